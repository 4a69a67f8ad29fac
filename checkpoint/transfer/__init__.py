"""State from and to elsewhere: peers that give it (donor, fetch), buckets that keep a copy (mirror).

May import: checkpoint.log, comm. Start with `fetch.py`, then `donor.py`.
"""
