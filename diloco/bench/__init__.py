"""Measure the product: each benchmark states what it measures, and is checked against its limit.

May import: everything but cli. Start with `report.py`, then any one of them.
"""
