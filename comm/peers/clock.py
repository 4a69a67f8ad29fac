"""The time of a run, on which its peers agree where the clocks of their machines do not.

It begins as this machine's clock, or as the answer of the first peer that is met. From then on it passes like the
monotonic clock, whatever is done to the machine's, and is put forward when another peer's is later: all come to have
the latest. Records in the directory are numbered and expire by it. A clock up to a day off is only reported.
"""

import logging
import os
import threading
import time

MAX_OFF_S = 24 * 3600.0  # of another peer's time from this machine's clock
WORTH_SAYING_S = 10.0

log = logging.getLogger(__name__)


class RunClock:
    """Keep the run's time in this process. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ahead_s = time.time() - time.monotonic()
        self._settled = False
        self._said = False

    def now(self) -> float:
        """Return the run's time, in seconds since 1970."""
        return time.monotonic() + self._ahead_s

    def settle(self) -> None:
        """Keep the present time even if the next peer's is earlier: records have been signed by it."""
        self._settled = True

    def hear(self, theirs: float) -> bool:
        """Take in another peer's time, and return False if that is more than a day from this machine's clock.

        It replaces a time that is not settled; a settled one is only ever put forward.
        """
        if abs(theirs - time.time()) > MAX_OFF_S:
            return False
        with self._lock:
            if not self._settled:
                self._ahead_s, self._settled = theirs - time.monotonic(), True
            self._put_forward(theirs)
        return True

    def advance_to(self, past: float) -> None:
        """Put the time forward to one that another peer had some time ago, unless it is more than a day off."""
        if past - time.time() <= MAX_OFF_S:
            with self._lock:
                self._put_forward(past)

    def _put_forward(self, theirs: float) -> None:
        self._ahead_s = max(self._ahead_s, theirs - time.monotonic())
        off_s = self.now() - time.time()
        if abs(off_s) > WORTH_SAYING_S and not self._said:
            self._said = True
            which = "behind" if off_s > 0 else "ahead of"
            log.warning("this machine's clock is %.0f s %s the run's, which is used: set the clock", abs(off_s), which)


RUN_CLOCK = RunClock()  # one for the process: hivemind knows one time only
os.register_at_fork(after_in_child=RUN_CLOCK.__init__)  # type: ignore[misc]  # this machine's clock may be set since
