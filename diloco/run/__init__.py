"""How an island gets into a run: as its founder, by a ticket, or back from its own disk; its folder and its signals.

May import: train and below. Start with `start.py`, then `join.py`.
"""
