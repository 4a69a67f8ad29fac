"""Run the protocol's own nodes on a virtual network: one world, one model of all-reduces, every invariant checked.

A world is the same however long things take in it (`costs.py`). With times drawn by chance (`chances.py`) it suffers
disasters: scripts (`scenario.py`) and random ones (`faults.py`). With times that are modelled (`modelled.py`) thousands
of islands live in virtual time (`outcome.py`).

May import: plan, elastic and below. Start with `world.py`, then `costs.py`.
"""
