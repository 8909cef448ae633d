"""The clock of deadlines. Nobody can set it, and where the platform allows it runs on while the
machine sleeps.
"""

from __future__ import annotations

import asyncio
import time
from typing import TypeVar

T = TypeVar("T")

# Timers stand still while the machine sleeps, so a long pause is slept in pieces of this length
# (seconds).
_PIECE = 0.5


def now() -> float:
    """Returns seconds on the clock of :attr:`Guard.deadline`, which counts time in suspend where
    the platform can.
    """
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


async def reached(moment: float) -> None:
    """Waits until that moment."""
    while (left := moment - now()) > 0:
        await asyncio.sleep(min(left, _PIECE))


async def finished(task: asyncio.Future[T], until: float) -> bool:
    """Waits, and returns whether the task or future has ended before that moment."""
    while not task.done():
        left = until - now()
        if left <= 0:
            return False
        await asyncio.wait({task}, timeout=min(left, _PIECE))
    return True
