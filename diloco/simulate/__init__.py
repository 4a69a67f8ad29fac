"""Simulate runs: `virtual` has no processes, `real` has real islands on emulated links.

May import: everything but bench and cli. Only these import it.
"""
