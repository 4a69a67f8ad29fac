"""Show people what happens: events, the terminal, trackers, and the board of several islands.

May import: config, the headers in checkpoint.log and the ground. Start with `events.py`.
"""
