"""What starts islands: processes of this machine, hosts by ssh, and schedulers; and the processes of one island's mesh.

May import: run and below. Start with `launching.py` and `backend.py`; `fleet.py` is for islands in one terminal.
"""
