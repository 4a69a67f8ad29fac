"""Runs that are not real: `virtual` has no processes, `real` has real islands on made links.

May import: everything but bench and cli. Production never imports it.
"""
