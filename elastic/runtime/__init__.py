"""The protocol on threads and streams: it sends, reduces, applies, fetches, and serves the trainer.

May import: elastic.protocol, checkpoint, comm. Start with `session.py`, then `driver.py` and `applier.py`.
"""
