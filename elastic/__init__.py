"""Who takes part, and when: rosters, rounds, joining, leaving, stragglers, partitions."""

if __name__ != "diloco.elastic":
    raise ImportError(
        f"this is diloco.elastic, imported as {__name__!r}: use `import diloco.elastic`"
        " (from the root of a diloco checkout, a bare `import elastic` finds this folder first)"
    )
