"""What an island's disk holds of its run: segments, journal, snapshots, and the replica that follows from them.

May import: comm. Start with `diskstore.py`, then `journal.py` and `segments.py`.
"""
