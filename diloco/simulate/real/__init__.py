"""Run real islands on this machine over emulated links: their network, the faults that hit them, the outcome.

`topology.py` and `faults.py` describe the network and the faults; `fleet.py` makes them happen, with `network.py` on
the islands' side; `outcome.py` combines the islands' events, `page.py` shows them.

May import: launch, plan and below. Start with `fleet.py`, then `network.py`.
"""
