"""What can be set: the schema of a run's settings, and how files and --set become one.

May import: units, errors, and the light tables of what can be chosen (comm.codec). Start with `schema.py`.
"""
