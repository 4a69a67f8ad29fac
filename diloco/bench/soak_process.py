"""Run `diloco` as an island of a soak: the real commands, with a clock that may be off and data that takes its time.

Started as `python -m diloco.bench.soak_process join TICKET …`.
"""

import os
import runpy
import time

CLOCK = "DILOCO_SOAK_CLOCK_S"  # how many seconds this island's clock is ahead
SOURCE = "paced"  # in the configuration: data.source


def main() -> None:
    """Set the clock before anything reads it, register the data source, and run `python -m diloco` with our words."""
    set_clock(float(os.environ.get(CLOCK, "0")))
    from diloco.config.schema import SOURCES

    SOURCES[SOURCE] = "diloco.bench.soak_data:PacedText"
    runpy.run_module("diloco", run_name="__main__", alter_sys=True)


def set_clock(ahead_s: float) -> None:
    """Make this process believe that it is so many seconds later; the monotonic clock stays."""
    true_time = time.time
    time.time = lambda: true_time() + ahead_s


if __name__ == "__main__":
    main()
