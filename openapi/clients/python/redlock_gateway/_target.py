"""What a guard holds: one lock, or a set of locks. A target sends the requests and reads their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ._api.api.locks import acquire_lock, acquire_locks, extend_lock, extend_locks, release_lock, release_locks
from ._api.models import (
    AcquireBody,
    AcquireSetBody,
    ExtendBody,
    ExtendManyBody,
    ExtendManyResults,
    ReleaseSetResults,
)
from ._api.types import UNSET, Response, Unset
from ._ask import Api, grant, is_loss
from ._results import Extension, extension_of, failure_of, in_order


class Target(Protocol):
    """One lock, or a set of locks."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the locks."""

    @property
    def label(self) -> str:
        """Names the target in errors and logs."""

    @property
    def is_joint(self) -> bool:
        """Whether its lease is extended together with those of other guards."""

    async def acquire(self, api: Api, key: str, body: Mapping[str, Any]) -> Response[Any]:
        """Asks for the target, with an Idempotency-Key."""

    async def extend(self, api: Api, token: str, ttl_ms: int) -> Response[Any]:
        """Extends all locks of the target."""

    def read_extended(self, answer: object) -> list[Extension]:
        """Reads the answer to extend(): an extension for each lock."""

    async def release(self, api: Api, *, token: str | Unset = UNSET, key: str | Unset = UNSET) -> Response[Any]:
        """Releases by the token, or by the key of an acquire whose answer never arrived."""

    def read_released(self, answer: object) -> None:
        """Reads the answer to release()."""


class Single:
    """One lock. A release by key needs the ``slots`` and ``take`` that the acquire asked for."""

    is_joint = True

    def __init__(self, name: str, slots: int | None = None, take: int | None = None) -> None:
        self.label = name
        self.names = (name,)
        self._slots = UNSET if slots is None else slots
        self._take = UNSET if take is None else take

    async def acquire(self, api: Api, key: str, body: Mapping[str, Any]) -> Response[Any]:
        return await acquire_lock.asyncio_detailed(
            self.label, client=api, body=AcquireBody.from_dict(body), idempotency_key=key
        )

    async def extend(self, api: Api, token: str, ttl_ms: int) -> Response[Any]:
        body = ExtendBody.from_dict({"ttl_ms": ttl_ms})
        return await extend_lock.asyncio_detailed(self.label, client=api, body=body, lock_token=token)

    def read_extended(self, answer: object) -> list[Extension]:
        granted = grant(answer)
        return [Extension(granted.validity, granted.elapsed, granted.waiters)]

    async def release(self, api: Api, *, token: str | Unset = UNSET, key: str | Unset = UNSET) -> Response[Any]:
        slots, take = (UNSET, UNSET) if isinstance(key, Unset) else (self._slots, self._take)
        return await release_lock.asyncio_detailed(
            self.label, client=api, lock_token=token, idempotency_key=key, slots=slots, take=take
        )

    def read_released(self, answer: object) -> None:
        pass


class LockSet:
    """A set of locks, with one token for all of them."""

    is_joint = False

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    @property
    def label(self) -> str:
        # No name has a comma.
        return ", ".join(self.names)

    async def acquire(self, api: Api, key: str, body: Mapping[str, Any]) -> Response[Any]:
        whole = AcquireSetBody.from_dict({**body, "names": list(self.names)})
        return await acquire_locks.asyncio_detailed(client=api, body=whole, idempotency_key=key)

    async def extend(self, api: Api, token: str, ttl_ms: int) -> Response[Any]:
        leases = [{"name": name, "token": token} for name in self.names]
        body = ExtendManyBody.from_dict({"leases": leases, "ttl_ms": ttl_ms})
        return await extend_locks.asyncio_detailed(client=api, body=body)

    def read_extended(self, answer: object) -> list[Extension]:
        """Raises Failure unless all locks were extended. A lost lock counts more than a lock that may
        be extended later.
        """
        results = in_order(answer.results if isinstance(answer, ExtendManyResults) else [], self.names)
        failures = [failure_of(each) for each in results if each.status != 200]
        if failures:
            raise max(failures, key=lambda failed: (is_loss(failed.problem), failed.pause or 0.0))
        return [extension_of(each) for each in results]

    async def release(self, api: Api, *, token: str | Unset = UNSET, key: str | Unset = UNSET) -> Response[Any]:
        return await release_locks.asyncio_detailed(
            client=api, name=list(self.names), lock_token=token, idempotency_key=key
        )

    def read_released(self, answer: object) -> None:
        """Raises Failure unless all locks were released, or were not held."""
        results = in_order(answer.results if isinstance(answer, ReleaseSetResults) else [], self.names)
        for failed in [failure_of(each) for each in results if each.status != 204]:
            if not is_loss(failed.problem):
                raise failed
