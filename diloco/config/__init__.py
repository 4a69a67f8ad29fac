"""What can be set: the schema of a run's settings, and how files and --set become one.

May import: units, errors. Start with `schema.py`.
"""
