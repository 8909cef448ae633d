"""Errors, with texts that a person can act on."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from .status import HeldLock, SlotHolder


@dataclass(frozen=True)
class Problem:
    """The body of an error answer (RFC 9457). Codes that this version does not know are kept as
    they are.
    """

    status: int
    """The HTTP status."""
    code: str
    """The kind of problem, for programs."""
    detail: str
    """What happened, with the value and what is allowed."""
    request_id: str | None = None
    """Identifies the request in the gateway's log."""
    retry_after: float | None = None
    """When trying again makes sense, in seconds."""
    holder: str | None = None
    """The holder's label."""
    expires_in: float | None = None
    """When the holder's lock expires unless it is extended, in seconds."""
    acquired_at: datetime | None = None
    """Since when the holder has the lock."""
    queue_position: int | None = None
    """The place of this request in this gateway's line for the lock; 1 is next."""
    queue_place_expires: float | None = None
    """How long the gateway keeps that place, in seconds. None: it keeps none."""
    holders: tuple[SlotHolder, ...] | None = None
    """The holders of the slots that are taken, by slot. None for a lock without slots."""
    held: tuple[HeldLock, ...] | None = None
    """The lock that kept a set from being granted; others may be held too. None for a single lock."""

    def __str__(self) -> str:
        return f"{self.code} ({self.status}): {self.detail}"


@dataclass(frozen=True)
class Loss:
    """Why a lock is no longer held, or may no longer be held."""

    kind: Literal["gone", "taken", "max_hold", "unconfirmed", "released"]
    """
    ``gone``: somebody released the lock, or it expired. ``taken``: somebody else holds it.
    ``max_hold``: it was held for the longest time that is allowed. ``unconfirmed``: no gateway
    confirmed an extension, and the deadline is near. ``released``: its own guard released it; only
    ``check()`` reports this, as it is no loss.
    """
    detail: str
    """The kind in words, with the last answers."""
    holder: str | None = None
    """For ``taken``: the label of the new holder."""
    name: str | None = None
    """The lock that was lost; of a set one of its locks. None if the gateways did not tell."""

    def __str__(self) -> str:
        return self.detail


class RedlockError(Exception):
    """The base class of all errors of this library."""

    name: str | None = None
    """The lock's name. For a set it has all names, separated by commas.

    None if the error is about no lock in particular.
    """

    # Without this, exceptions with fields beside the message cannot be pickled.
    def __reduce__(self) -> Any:
        return _again, (type(self), self.args, self.__dict__)


def _again(kind: type[RedlockError], args: tuple[object, ...], fields: dict[str, object]) -> RedlockError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


def _about(name: str | None, text: str) -> str:
    return text if name is None else f"lock {name!r}: {text}"


class SetupError(RedlockError, ValueError):
    """An argument cannot work; no request was sent."""

    def __init__(self, message: str, name: str | None = None) -> None:
        super().__init__(_about(name, message))
        self.name = name


class RefusedError(RedlockError):
    """A gateway refuses the request; a repetition would be refused too."""

    def __init__(self, problem: Problem, name: str | None = None) -> None:
        super().__init__(_about(name, str(problem)))
        self.name = name
        self.problem = problem
        """The whole answer."""

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.problem.status

    @property
    def code(self) -> str:
        """The kind of problem: ``invalid_ttl``, ``unauthenticated``, ``forbidden``, …"""
        return self.problem.code

    @property
    def detail(self) -> str:
        """What happened, with the value and what is allowed."""
        return self.problem.detail

    @property
    def retry_after(self) -> float | None:
        """When trying again makes sense, in seconds."""
        return self.problem.retry_after


class LockHeldError(RefusedError):
    """Somebody else held the lock until the wait ended."""

    @property
    def holder(self) -> str | None:
        """The holder's label, if there is one."""
        return self.problem.holder

    @property
    def expires_in(self) -> float | None:
        """When the holder's lock expires unless it is extended, in seconds."""
        return self.problem.expires_in

    @property
    def acquired_at(self) -> datetime | None:
        """Since when the holder has the lock, if the gateway says so."""
        return self.problem.acquired_at

    @property
    def holders(self) -> tuple[SlotHolder, ...] | None:
        """The holders of the slots that are taken, by slot; None for a lock without slots."""
        return self.problem.holders

    @property
    def held(self) -> tuple[HeldLock, ...] | None:
        """The lock that kept a set from being granted; None for a single lock."""
        return self.problem.held

    @property
    def position(self) -> int | None:
        """The last place in the gateway's line for the lock, if the gateway says so; 1 is next."""
        return self.problem.queue_position


class UnavailableError(RedlockError):
    """No gateway decided."""

    def __init__(self, heard: list[str], problem: Problem | None = None, name: str | None = None) -> None:
        super().__init__(_about(name, "no gateway decided: " + "; ".join(heard)))
        self.name = name
        self.heard = heard
        """The last answer or failure of each URL."""
        self.problem = problem
        """The last answer with a code, if any gateway gave one."""

    @property
    def status(self) -> int | None:
        """The HTTP status of the last answer with a code."""
        return None if self.problem is None else self.problem.status

    @property
    def code(self) -> str | None:
        """The last answer's code: ``quorum_unavailable``, ``overloaded``, ``rate_limited``, …"""
        return None if self.problem is None else self.problem.code

    @property
    def retry_after(self) -> float | None:
        """When trying again makes sense, in seconds."""
        return None if self.problem is None else self.problem.retry_after


class LockLostError(RedlockError):
    """The lock was lost: work under it may have overlapped with another holder's.

    ``name`` of a lost set is the lock that was lost, or all names if that is unknown.
    """

    def __init__(self, loss: Loss, name: str | None = None) -> None:
        name = loss.name or name
        super().__init__(_about(name, f"the lock was lost: {loss}"))
        self.name = name
        self.loss = loss
        """Why."""


# The former names of the exceptions.
Refused = RefusedError
LockHeld = LockHeldError
Unavailable = UnavailableError
LockLost = LockLostError
