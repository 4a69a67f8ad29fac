"""Bytes between peers: identity, directory, transports, codecs, all-reduce, link shaping."""

if __name__ != "diloco.comm":
    raise ImportError(
        f"this is diloco.comm, imported as {__name__!r}: use `import diloco.comm`"
        " (from the root of a diloco checkout, a bare `import comm` finds this folder first)"
    )
