"""Show a run as a web page: what its islands' files or, from afar, its members say, streamed to whoever looks.

May import: history, run, report and below. Start with `feed.py`.
"""
