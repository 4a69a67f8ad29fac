"""Thousands of islands in virtual time: the protocol's own machines, with modelled computers and links."""
