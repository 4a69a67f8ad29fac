"""Benchmarks. Each returns a `Report`: raw figures, and checks that hold them to a limit."""
