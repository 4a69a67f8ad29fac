"""Thousands of islands in virtual time: real nodes and messages, modelled compute and links.

May import: simulate.protocol, plan. Start with `world.py`, then `costs.py`.
"""
