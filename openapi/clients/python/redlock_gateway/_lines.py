"""Writes the log lines of this library in a separate thread.

An unread log blocks its writer. The background thread extends all locks, and a thread of the user
must be able to leave its ``with`` block. So neither writes lines itself.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import threading

# The number of waiting lines. Further lines are dropped.
_MAX_LINES = 1000
# How long the end of the process waits for the last lines, in seconds.
_LAST_LINES = 1.0
# All lines of this logger are diverted, whichever thread they come from.
_OURS = "redlock_gateway"
# Libraries that the background thread calls log by these names, some of them for every request.
# Only the lines of the background thread are diverted.
_LIBRARIES = [
    "asyncio",
    "concurrent.futures",
    "httpx",
    "httpcore.connection",
    "httpcore.http11",
]

_here = threading.local()


class _Writer:
    """The thread that writes the lines. It is a daemon, so it ends with the process."""

    def __init__(self) -> None:
        # A SimpleQueue may be used again by a signal handler that interrupts its use.
        self._waiting: queue.SimpleQueue[logging.LogRecord | threading.Event] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="redlock-gateway-log", daemon=True).start()

    def write(self, line: logging.LogRecord) -> None:
        if self._waiting.qsize() < _MAX_LINES:
            self._waiting.put(line)

    def flush(self) -> None:
        """Waits until the lines so far are written, for a limited time."""
        are_written = threading.Event()
        self._waiting.put(are_written)
        are_written.wait(_LAST_LINES)

    def _write(self) -> None:
        _here.is_writer = True
        while True:
            line = self._waiting.get()
            if isinstance(line, threading.Event):
                line.set()
                continue
            try:
                logging.getLogger(line.name).handle(line)
            except BaseException:
                # A handler of the user has failed. It may still write the next line.
                continue


_mutex = threading.Lock()
_current: _Writer | None = None


def divert() -> None:
    """Diverts all lines of the calling thread from now on, also those of libraries."""
    _here.is_diverted = True


def _writer() -> _Writer:
    global _current
    with _mutex:
        if _current is None:
            _current = _Writer()
        return _current


def _passes(line: logging.LogRecord) -> bool:
    if getattr(_here, "is_writer", False):
        return True
    if line.name != _OURS:
        if not getattr(_here, "is_diverted", False):
            return True
        # httpx has a line at INFO for each request. Here such a line is a detail of this library.
        if line.levelno <= logging.INFO and not logging.getLogger(_OURS).isEnabledFor(logging.DEBUG):
            return False
    try:
        _writer().write(line)
    except RuntimeError:
        # No thread can be started. The line is dropped.
        pass
    return False


def _after_fork() -> None:
    # The parent writes its own lines. The child has no writer thread yet.
    global _current, _mutex
    _mutex = threading.Lock()
    _current = None


def _at_exit() -> None:
    if _current is not None:
        _current.flush()


for _name in [_OURS, *_LIBRARIES]:
    logging.getLogger(_name).addFilter(_passes)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
# It runs before logging.shutdown, which was registered earlier. While a log is blocked,
# logging.shutdown waits for its handler, and the process does not end.
atexit.register(_at_exit)
