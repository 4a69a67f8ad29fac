"""The protocol on a virtual network: disasters as scripts and at random, with every invariant checked.

May import: elastic.protocol. Start with `world.py`, then `scenario.py`.
"""
