"""Peers and how they find each other: identities, records, tickets, and the directory in hivemind's DHT.

May import: errors. Start with `directory.py`, then `record.py`.
"""
