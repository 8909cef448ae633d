"""One thread with an event loop, which makes all requests of this process.

A blocked event loop or a busy thread of the user must not lose a lock, so extensions do not depend
on them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from ._lines import divert

T = TypeVar("T")

log = logging.getLogger("redlock_gateway")


class Background:
    """The background thread. It is a daemon: a process can end without it, and its locks then end
    with their TTL.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="redlock-gateway", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Returns whether the thread runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        divert()
        # A SystemExit from one coroutine ends run_forever. The thread must go on, because it
        # extends all locks.
        while not self.loop.is_closed():
            try:
                self.loop.run_forever()
            except BaseException:
                log.exception("the background thread continues after this error")

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine in the thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T], *, to_the_end: bool = False) -> T:
        """Runs a coroutine and waits. An interruption cancels the coroutine, unless ``to_the_end``
        is set.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise RuntimeError("the background thread cannot wait for itself")
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            if not to_the_end:
                future.cancel()
            raise

    async def arun(self, work: Coroutine[Any, Any, T], *, to_the_end: bool = False) -> T:
        """Does the same from another event loop."""
        future = asyncio.wrap_future(self.start(work))
        return await (asyncio.shield(future) if to_the_end else future)


_mutex = threading.Lock()
_current: Background | None = None
# Objects from before a fork share sockets and the epoll instance with the parent, so they must not
# be freed.
left_behind: list[object] = []


def background() -> Background:
    """Returns the thread of this process; the first call starts it."""
    global _current
    with _mutex:
        if _current is None or not _current.is_alive:
            _current = Background()
        return _current


def _after_fork() -> None:
    global _current, _mutex
    _mutex = threading.Lock()
    left_behind.append(_current)
    _current = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
