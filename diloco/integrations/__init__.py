"""Callbacks by which training frameworks that own the loop take part in a run: Hugging Face `Trainer`, Lightning.

May import: api and what lies below it. Start with `open_run.py`, then `hf.py`; each framework is an extra.
"""
