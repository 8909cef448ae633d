"""The state of locks, for people: it may be outdated on arrival."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal


@dataclass(frozen=True)
class Waiter:
    """A request that waits for a lock."""

    owner: str | None
    """Its label."""
    waiting_since: datetime | None
    """When it joined the line, by the gateway's wall clock."""
    is_away: bool
    """Whether it is between two requests of one wait."""


@dataclass(frozen=True)
class SlotHolder:
    """The holder of one slot of a lock."""

    slot: int
    """The number of the slot, from 1."""
    holder: str | None = None
    """The holder's label."""
    fencing_token: int | None = None
    """The holder's fencing token. None in a LockHeldError."""
    expires_in: float | None = None
    """When the slot is free unless it is extended, in seconds."""
    acquired_at: datetime | None = None
    """Since when the holder has the slot."""


@dataclass(frozen=True)
class HeldLock:
    """A held lock that kept a set from being granted."""

    name: str
    """The lock's name."""
    holder: str | None = None
    """The holder's label."""
    expires_in: float | None = None
    """When the holder's lock expires unless it is extended, in seconds."""


@dataclass(frozen=True)
class LockStatus:
    """A lock as a majority of the masters sees it. Never the token. What is unknown is None."""

    name: str
    """The lock's name."""
    state: Literal["held", "free", "unknown"]
    """``held`` by a majority; ``free``: nobody can have one; ``unknown``: too few masters answered."""
    owner: str | None = None
    """The holder's label."""
    metadata: Mapping[str, str] | None = None
    """The holder's metadata."""
    fencing_token: int | None = None
    """The holder's fencing token. None if another Redlock client holds the lock."""
    acquired_at: datetime | None = None
    """When the lock was acquired, by the wall clock of that gateway."""
    expires_in: float | None = None
    """When the lock ends unless it is extended, in seconds."""
    key: str | None = None
    """The name of the API key that acquired the lock."""
    nodes: Mapping[str, str] | None = None
    """The answer of each master. None in lists."""
    waiters: tuple[Waiter, ...] = ()
    """The line at this gateway, the next one first; 100 at most. Empty in lists."""
    waiters_total: int = 0
    """How many wait at this gateway."""
    slots: int | None = None
    """How many may hold the lock at once: the largest number that a holder asked for."""
    holders: tuple[SlotHolder, ...] | None = None
    """The holder of each slot that is held. None if no holder asked for slots. The fields of the
    holder above are those of the first one.
    """
    unknown_slots: tuple[int, ...] = ()
    """The slots that may be held: too few masters answered, or their answers differ."""
    slot: int | None = None
    """In lists: the slot that the entry is about, if it is another one than slot 1."""


@dataclass(frozen=True)
class LockList:
    """A page of held locks."""

    locks: tuple[LockStatus, ...]
    """Held locks, in no particular order."""
    next_cursor: str | None
    """Give it to ``list`` as ``cursor`` for the next page. None at the end."""


def moment(value: object) -> datetime | None:
    """Reads a time of RFC 3339; None if it is none."""
    try:
        return datetime.fromisoformat(str(value).replace("Z", "+00:00"))
    except ValueError:
        return None


def slot_holders(answer: Sequence[Mapping[str, Any]] | None) -> tuple[SlotHolder, ...] | None:
    """Reads the holders of slots; None if there is no list of them."""
    if answer is None:
        return None
    return tuple(
        SlotHolder(
            each["slot"],
            each.get("holder"),
            each.get("fencing_token"),
            seconds(each.get("expires_in_ms")),
            moment(each.get("acquired_at")),
        )
        for each in answer
    )


def held_locks(answer: Sequence[Mapping[str, Any]] | None) -> tuple[HeldLock, ...] | None:
    """Reads the locks that kept a set from being granted; None if there is no list of them."""
    if answer is None:
        return None
    return tuple(HeldLock(each["name"], each.get("holder"), seconds(each.get("expires_in_ms"))) for each in answer)


def seconds(milliseconds: Any) -> float | None:
    """Converts a number of an answer; None if there is none."""
    return None if milliseconds is None else float(milliseconds) / 1000


def lock_status(answer: Mapping[str, Any]) -> LockStatus:
    """Reads the state of a lock."""
    nodes = answer.get("nodes")
    waiters = answer.get("waiters", ())
    return LockStatus(
        name=answer["name"],
        state=answer["state"],
        owner=answer.get("owner"),
        metadata=answer.get("metadata"),
        fencing_token=answer.get("fencing_token"),
        acquired_at=moment(answer.get("acquired_at")),
        expires_in=seconds(answer.get("expires_in_ms")),
        key=answer.get("key"),
        nodes=None if nodes is None else {node["node"]: node["state"] for node in nodes},
        waiters=tuple(
            Waiter(each.get("owner"), moment(each.get("waiting_since")), bool(each.get("is_away"))) for each in waiters
        ),
        waiters_total=answer.get("waiters_total", len(waiters)),
        slots=answer.get("slots"),
        holders=slot_holders(answer.get("holders")),
        unknown_slots=tuple(answer.get("unknown_slots", ())),
        slot=answer.get("slot"),
    )


def lock_list(answer: Mapping[str, Any]) -> LockList:
    """Reads a page of locks."""
    return LockList(tuple(lock_status(each) for each in answer["locks"]), answer.get("next_cursor"))
