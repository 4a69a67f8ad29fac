"""What survives: the outer log, snapshots, inner state, recovery."""

if __name__ != "diloco.checkpoint":
    raise ImportError(
        f"this is diloco.checkpoint, imported as {__name__!r}: use `import diloco.checkpoint`"
        " (from the root of a diloco checkout, a bare `import checkpoint` finds this folder first)"
    )
