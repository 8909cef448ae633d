"""Holds locks of a redlock-gateway: extends them while work goes on, and reports a loss at once.

    from redlock_gateway import Client

    client = Client("http://127.0.0.1:8080")
    with client.lock("reports/nightly", ttl=30, wait=60) as guard:
        for row in rows:
            guard.check()
            write(row, guard.fencing_token)

All times are floats in seconds. ``redlock_gateway._api`` is the generated code, with every other call.
"""

from ._place import Waiting
from .client import Client, Lock, current_guard
from .clock import now
from .errors import (
    LockHeld,
    LockHeldError,
    LockLost,
    LockLostError,
    Loss,
    Problem,
    RedlockError,
    Refused,
    RefusedError,
    SetupError,
    Unavailable,
    UnavailableError,
)
from .guard import Guard
from .status import HeldLock, LockList, LockStatus, SlotHolder, Waiter

__all__ = [
    "Client",
    "Guard",
    "HeldLock",
    "Lock",
    "LockHeld",
    "LockHeldError",
    "LockList",
    "LockLost",
    "LockLostError",
    "LockStatus",
    "Loss",
    "Problem",
    "RedlockError",
    "Refused",
    "RefusedError",
    "SetupError",
    "SlotHolder",
    "Unavailable",
    "UnavailableError",
    "Waiter",
    "Waiting",
    "current_guard",
    "now",
]
__version__ = "0.1.0"
