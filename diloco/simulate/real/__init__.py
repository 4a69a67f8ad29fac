"""Real islands on this machine over links that are not: how they are connected, what befalls them, what came of it.

`topology.py` and `faults.py` say what there is and what happens; `fleet.py` makes it happen, with `network.py` on the
islands' side; `outcome.py` puts the islands' events together, `page.py` shows it.

May import: launch, plan and below. Start with `fleet.py`, then `network.py`.
"""
