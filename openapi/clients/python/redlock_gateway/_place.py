"""The place of an acquisition in the line for its lock."""

from __future__ import annotations

import getpass
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from .errors import Problem

log = logging.getLogger("redlock_gateway")

# The longest label that a gateway accepts.
_LONGEST_LABEL = 255


@dataclass(frozen=True)
class Waiting:
    """What is known while an acquisition waits. What the gateway does not say is None."""

    name: str
    """The lock's name. For a set it has all names, separated by commas."""
    position: int | None
    """The place in this gateway's line for the lock; 1 is next. A set is in the line of the lock that
    refused it, and its place is not kept.
    """
    holder: str | None
    """The holder's label."""
    acquired_at: datetime | None
    """Since when the holder has the lock."""
    gateway: str
    """The URL of the gateway that keeps the place."""


class Place:
    """Tells the user of the place, and says so when it was lost."""

    def __init__(self, name: str, on_waiting: Callable[[Waiting], object] | None) -> None:
        self.is_kept = False
        self._name = name
        self._on_waiting = on_waiting
        self._last: Waiting | None = None
        self._is_telling = threading.Lock()

    def refused(self, gateway: str, problem: Problem) -> None:
        """Notes the end of a turn: somebody else holds the lock."""
        was_kept = self.is_kept
        self.is_kept = problem.queue_place_expires is not None
        before, position = self._last, problem.queue_position
        self._last = Waiting(self._name, position, problem.holder, problem.acquired_at, gateway)
        # A set has no place that is kept between its requests.
        if before is None or before.position is None or not was_kept:
            return
        where = "waiting" if position is None else f"{_ordinal(position)} in line"
        if gateway != before.gateway:
            log.warning(
                "lock %r: place in line lost: %s does not answer; now %s at %s",
                self._name,
                before.gateway,
                where,
                gateway,
            )
        elif position is not None and position > before.position:
            log.warning("lock %r: place in line lost; now %s at %s", self._name, where, gateway)

    def tell(self) -> None:
        """Calls the user's function in a thread of its own, unless an earlier call still runs."""
        told, waiting = self._on_waiting, self._last
        if told is None or waiting is None or not self._is_telling.acquire(blocking=False):
            return

        def call() -> None:
            try:
                told(waiting)
            except BaseException:
                log.exception("lock %r: on_waiting has failed", self._name)
            finally:
                self._is_telling.release()

        try:
            threading.Thread(target=call, name="redlock-gateway-waiting", daemon=True).start()
        except RuntimeError:
            # No thread can be started.
            self._is_telling.release()


def default_owner() -> str:
    """Returns ``user@host:pid program``, as a label for people."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):
        user = "unknown"
    program = os.path.basename(sys.argv[0]) if sys.argv else ""
    if program in ("", "-c", "-m"):
        program = os.path.basename(sys.executable) or "python"
    label = f"{user}@{socket.gethostname()}:{os.getpid()} {program}"
    # A gateway refuses control characters.
    return "".join(each if each.isprintable() else "?" for each in label)[:_LONGEST_LABEL]


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
