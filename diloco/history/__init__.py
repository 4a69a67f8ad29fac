"""What has been trained: the log, going back, restoring, and what is made of a run's newest state.

May import: run and below. Start with `log.py`.
"""
