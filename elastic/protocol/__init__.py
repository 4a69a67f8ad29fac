"""The round protocol, pure: inputs with a time go in, effects come out. No sockets, clocks, threads or tensors.

May import: comm.peers (signatures). Start with `node.py` and what it is made of, then `messages.py` and `record.py`.
"""
