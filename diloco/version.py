__version__ = "0.1.0"
PROTOCOL = 4  # 2: fragments, result codecs, more outer optimizers; 3: the owner, its amendments, parents; 4: chunks
