"""Runs that are not real: `protocol` and `virtual` have no processes, `real` has real islands on made links.

May import: everything but bench and cli. Production never imports it.
"""
