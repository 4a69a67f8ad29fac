"""One asyncio loop on one thread, used from ordinary blocking code. A call never outlives the loop it waits for."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

from diloco.errors import DirectoryError

Result = TypeVar("Result")
CLOSE_TIMEOUT_S = 10.0
log = logging.getLogger(__name__)


class LoopThread:
    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._ended: Future[None] = Future()
        self._closers: list[Callable[[], Awaitable[None]]] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._ended.done()

    def call(self, work: Coroutine[Any, Any, Result], timeout_s: float) -> Result:
        """Run this on the loop and wait for it. Not for the loop's own thread, which would wait for itself."""
        assert threading.current_thread() is not self._thread
        try:
            if not self.alive:
                raise RuntimeError("loop ended")
            future = asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError:
            work.close()
            raise self._gone() from None
        try:
            either: list[Future[Any]] = [future, self._ended]
            wait(either, timeout_s, FIRST_COMPLETED)
            if future.done() and not future.cancelled():
                return future.result()
        finally:
            future.cancel()
        if not self.alive:
            raise self._gone()
        raise DirectoryError(f"the network did not answer within {timeout_s:.0f} s. It may still; try again")

    def at_end(self, closer: Callable[[], Awaitable[None]]) -> None:
        """Run this on the loop when it ends, whatever ended it; the last one added runs first."""
        self._closers.append(closer)

    def stop(self) -> None:
        """End every task and the thread. Safe to call twice."""
        if self.alive:
            self.loop.call_soon_threadsafe(self.loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _gone(self) -> DirectoryError:
        return DirectoryError("the network thread has ended and takes no more calls: start the directory again")

    def _run(self) -> None:
        try:
            asyncio.set_event_loop(self.loop)
            self.loop.run_forever()
        except BaseException:  # the thread's outermost frame: callers learn of it from `_ended`
            log.exception("the network thread failed")
        finally:
            self._ended.set_result(None)
            self._drain()

    def _drain(self) -> None:
        for closer in reversed(self._closers):
            try:
                self.loop.run_until_complete(asyncio.wait_for(closer(), CLOSE_TIMEOUT_S))
            except Exception:  # still the outermost frame: the other closers must have their turn
                log.exception("closing the network failed in part")
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()
