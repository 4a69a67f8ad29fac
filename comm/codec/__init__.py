"""How vectors become bytes: codecs by name, rounding noise, error feedback.

May import: errors. Start with `registry.py`, then `base.py`.
"""
