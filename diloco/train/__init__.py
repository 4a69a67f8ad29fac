"""The algorithm: inner steps, the pseudo-gradient, the outer update, and when each happens.

May import: island, data, report, elastic, checkpoint and below. Start with `trainer.py`, then `policy.py` and
`exchange.py`.
"""
