"""Writes the log lines of the background thread in a separate thread.

An unread log blocks its writer. The background thread extends all locks, so it must not write lines itself.
"""

from __future__ import annotations

import logging
import queue
import threading

# The number of waiting lines. Further lines are dropped.
_MAX_LINES = 1000
# Libraries that the background thread calls log by these names, some of them for every request.
_LOGGERS = [
    "redlock_gateway",
    "asyncio",
    "concurrent.futures",
    "httpx",
    "httpcore.connection",
    "httpcore.http11",
]

_here = threading.local()


def written_elsewhere() -> None:
    """Lets another thread write the lines of this thread from now on."""
    lines: queue.Queue[logging.LogRecord] = queue.Queue(_MAX_LINES)
    threading.Thread(target=_write, args=[lines], name="redlock-gateway-log", daemon=True).start()
    _here.lines = lines


def _write(lines: queue.Queue[logging.LogRecord]) -> None:
    while True:
        line = lines.get()
        try:
            logging.getLogger(line.name).handle(line)
        except BaseException:
            # A handler of the user has failed. It may still write the next line.
            continue


def _passes(line: logging.LogRecord) -> bool:
    lines: queue.Queue[logging.LogRecord] | None = getattr(_here, "lines", None)
    if lines is None:
        return True
    try:
        lines.put_nowait(line)
    except queue.Full:
        pass
    return False


for _name in _LOGGERS:
    logging.getLogger(_name).addFilter(_passes)
