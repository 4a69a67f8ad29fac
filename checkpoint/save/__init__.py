"""Saves of an island: everything that its next inner step depends on, in one folder that any mesh can load.

May import: comm and checkpoint.log. Start with `saver.py`; `facts.py` is for who only looks at what there is.
"""
