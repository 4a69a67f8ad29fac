"""What survives a crash: the outer log, snapshots, the inner state, and how they are recovered."""

if __name__ != "diloco.checkpoint":
    raise ImportError(
        f"this is diloco.checkpoint, imported as {__name__!r}: use `import diloco.checkpoint`"
        " (from the root of a diloco checkout, a bare `import checkpoint` finds this folder first)"
    )
