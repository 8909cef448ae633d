"""Log lines of the background thread, written by a thread of their own.

A log that nobody reads blocks whoever writes it. The background thread extends all locks, so it writes no line itself.
"""

from __future__ import annotations

import logging
import queue
import threading

# Lines that wait. Further ones are dropped.
_MOST = 1000
# What the background thread calls logs by these names, at every request where that is switched on.
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
    """From now on the lines of this thread are written by another thread."""
    lines: queue.Queue[logging.LogRecord] = queue.Queue(_MOST)
    threading.Thread(target=_write, args=[lines], name="redlock-gateway-log", daemon=True).start()
    _here.lines = lines


def _write(lines: queue.Queue[logging.LogRecord]) -> None:
    while True:
        line = lines.get()
        try:
            logging.getLogger(line.name).handle(line)
        except BaseException:
            # A handler of the user's. The next line may be written all the same.
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
