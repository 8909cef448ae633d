"""The clock of deadlines: nobody sets it, and where the platform has one it goes on while the machine sleeps."""

from __future__ import annotations

import asyncio
import time

# Timers stand still while the machine sleeps; a long pause is slept in pieces of this length (seconds).
_PIECE = 0.5


def now() -> float:
    """Seconds on the clock of :attr:`Guard.deadline`. After a suspended night a lock is known to be lost."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


async def reached(moment: float) -> None:
    """Returns when it has come, also when the machine has slept meanwhile."""
    while (left := moment - now()) > 0:
        await asyncio.sleep(min(left, _PIECE))


async def finished(task: asyncio.Task[object], until: float) -> bool:
    """Whether the task has ended before that moment."""
    while not task.done():
        left = until - now()
        if left <= 0:
            return False
        await asyncio.wait({task}, timeout=min(left, _PIECE))
    return True
