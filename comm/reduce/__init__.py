"""The all-reduce of encoded vectors: who owns which span, and how its chunks travel.

May import: comm.codec, comm.transport. Start with `allreduce.py`, then `spans.py`.
"""
