"""Data: a source is a row of tokens indexable by position; samples are cut out of it and shuffled without memory.

>>> samples = Samples(stdlib_source(), sequence=256, seed=0, validation_fraction=0.05)
>>> samples.train(position=0, count=16).shape  # the same rows on every island
(16, 257)

May import: island (where a batch goes) and below. Start with `samples.py`, then `batches.py`.
"""
