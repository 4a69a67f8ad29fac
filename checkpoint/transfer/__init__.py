"""State from and to elsewhere: peers give it to each other (donor, fetch), buckets keep a copy (mirror).

May import: checkpoint.log, comm. Start with `fetch.py`, then `donor.py`.
"""
