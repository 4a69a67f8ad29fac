"""Processes of this machine: the islands of a fleet, and the processes of one island's mesh.

May import: run and below. Start with `fleet.py`, then `processes.py`.
"""
