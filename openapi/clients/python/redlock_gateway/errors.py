"""Errors, with texts that a person can act on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


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

    def __str__(self) -> str:
        return self.detail


class RedlockError(Exception):
    """The base class of all errors of this library."""

    # Without this, exceptions with fields beside the message cannot be pickled.
    def __reduce__(self) -> Any:
        return _again, (type(self), self.args, self.__dict__)


def _again(kind: type[RedlockError], args: tuple[object, ...], fields: dict[str, object]) -> RedlockError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(fields)
    return error


class SetupError(RedlockError, ValueError):
    """An argument cannot work; no request was sent."""


class Refused(RedlockError):
    """A gateway refuses the request; a repetition would be refused too."""

    def __init__(self, problem: Problem, message: str | None = None) -> None:
        super().__init__(message or str(problem))
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


class LockHeld(Refused):
    """Somebody else held the lock until the wait ended."""

    def __init__(self, problem: Problem) -> None:
        who = repr(problem.holder) if problem.holder else "somebody"
        message = f"{who} holds the lock"
        if problem.expires_in is not None:
            message += f"; it expires in {problem.expires_in:.1f} s unless it is extended"
        super().__init__(problem, message)

    @property
    def holder(self) -> str | None:
        """The holder's label, if there is one."""
        return self.problem.holder

    @property
    def expires_in(self) -> float | None:
        """When the holder's lock expires unless it is extended, in seconds."""
        return self.problem.expires_in


class Unavailable(RedlockError):
    """No gateway decided."""

    def __init__(self, heard: list[str], problem: Problem | None = None) -> None:
        super().__init__("no gateway decided: " + "; ".join(heard))
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


class LockLost(RedlockError):
    """The lock was lost: work under it may have overlapped with another holder's."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(f"the lock was lost: {loss}")
        self.loss = loss
        """Why."""
