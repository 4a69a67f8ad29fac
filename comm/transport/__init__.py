"""Streams of frames between two peers: in memory, TCP with mutual TLS, libp2p; shaped, pooled or chosen.

May import: comm.peers. Start with `transport.py`, then `direct.py`.
"""
