"""What a run has trained: its log, rewinding, restoring, and what is made of its newest state.

May import: run and below. Start with `log.py`.
"""
