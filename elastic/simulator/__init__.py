"""The protocol on a virtual clock and network: seeded disasters, hand-written ones, invariants at every commit."""
