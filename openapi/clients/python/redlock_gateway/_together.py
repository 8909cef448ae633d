"""Guards of one client renew together: one ``PATCH /locks`` extends all leases that are due at about
the same time.

Each guard enters its lease, and waits here until the lease is due. The first guard whose lease is
due takes along the others that are due soon. Each guard still watches its own deadline. A lease that
the joint request did not decide is extended by its guard alone. A set has a request of its own,
which its guard sends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ._api.api.locks import extend_locks
from ._api.models import ExtendManyBody, ExtendManyResults, ExtendResult
from ._api.types import Response, Unset
from ._ask import Api, Failure, Gateways, is_loss, limit_of_a_try, loss_of
from ._background import left_behind
from ._results import extension_of, failure_of
from .clock import finished, now
from .errors import Loss, RefusedError, UnavailableError

# Limit of a gateway on the leases of one request. With the longest names that is about 350 kB.
_MAX_LEASES = 1000
# The part of the interval between two renewals by which a lease may be renewed early.
_EARLY = 4
# The part of the time left that a joint request may take. In the rest, each guard asks alone.
_SHARE = 2

# When the request was sent and the new deadline, or the loss. None if the guard has to ask alone.
Renewed = tuple[float, float, int | None] | Loss | None


@dataclass(eq=False)
class Renewal:
    """A lease that waits for its next extension. All times are moments, but for ``ttl`` and
    ``interval``, in seconds.
    """

    name: str
    token: str = field(repr=False)
    ttl: float
    interval: float
    due: float
    give_up: float
    # Cancelled when the guard is released.
    renewed: asyncio.Future[Renewed] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Together:
    """The renewals of one client. All methods run in the background thread."""

    def __init__(self, gateways: Gateways) -> None:
        self.gateways = gateways
        self._waiting: set[Renewal] = set()
        self._requests: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        # A gateway has answered that it does not know PATCH /locks.
        self._is_unknown = False

    async def renew(self, renewal: Renewal) -> Renewed:
        """Waits until a lease is due, and renews it together with others. Returns None if its guard
        has to ask alone.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            # A forked child has no part in the locks of its parent.
            left_behind.append((self._waiting, self._requests))
            self._waiting, self._requests, self._loop = set(), set(), loop
        self._waiting.add(renewal)
        try:
            if not await finished(renewal.renewed, renewal.due):
                taken = self._take(renewal)
                if len(taken) == 1:
                    return None
                if taken:
                    self._start(taken)
                # Otherwise the request of another guard has the lease.
                if not await finished(renewal.renewed, renewal.give_up):
                    return None
            return renewal.renewed.result()
        finally:
            self._waiting.discard(renewal)
            renewal.renewed.cancel()

    def _take(self, first: Renewal) -> list[Renewal]:
        """Takes a lease out, with the others to renew together with it. Returns none if another
        request has taken the lease.
        """
        if first not in self._waiting:
            return []
        self._waiting.remove(first)
        if self._is_unknown:
            return [first]
        soon = [r for r in self._waiting if r.ttl == first.ttl and r.due <= now() + r.interval / _EARLY]
        others = sorted(soon, key=lambda renewal: renewal.due)[: _MAX_LEASES - 1]
        self._waiting.difference_update(others)
        return [first, *others]

    def _start(self, leases: list[Renewal]) -> None:
        # The request outlives a release of the first guard, because other guards wait for it too.
        request = asyncio.create_task(self._extend_many(leases))
        self._requests.add(request)
        request.add_done_callback(self._requests.discard)

        count = len(leases)

        def ended(_: object) -> None:
            nonlocal count
            count -= 1
            if count == 0:
                request.cancel()

        for renewal in leases:
            renewal.renewed.add_done_callback(ended)

    async def _extend_many(self, leases: Sequence[Renewal]) -> None:
        """Extends leases by one request, which is repeated for those that are not decided."""
        left = min(renewal.give_up for renewal in leases) - now()
        ttl_ms = round(leases[0].ttl * 1000)
        asked: list[Renewal] = []
        sent = 0.0

        async def send(api: Api) -> Response[Any]:
            nonlocal asked, sent
            asked = [renewal for renewal in leases if not renewal.renewed.done()]
            refs = [{"name": renewal.name, "token": renewal.token} for renewal in asked]
            sent = now()
            body = ExtendManyBody.from_dict({"leases": refs, "ttl_ms": ttl_ms})
            return await extend_locks.asyncio_detailed(client=api, body=body)

        def read(answer: object) -> None:
            if not isinstance(answer, ExtendManyResults) or len(answer.results) != len(asked):
                raise ValueError("a result for each lease was expected")
            failures = []
            for renewal, result in zip(asked, answer.results, strict=True):
                if renewal.renewed.done():
                    continue
                try:
                    renewal.renewed.set_result(_renewed(renewal, result, sent))
                except Failure as failure:
                    failures.append(failure)
            if failures:
                raise max(failures, key=lambda failure: failure.pause or 0.0)

        try:
            await self.gateways.ask(send, read, now() + left / _SHARE, limit_of_a_try(left), name=None)
        except RefusedError as refused:
            if refused.problem.status in (404, 405):
                self._is_unknown = True
        except UnavailableError:
            pass
        finally:
            for renewal in leases:
                if not renewal.renewed.done():
                    renewal.renewed.set_result(None)


def _renewed(renewal: Renewal, result: ExtendResult, sent: float) -> Renewed:
    """Reads the result for one lease. Raises Failure if the lease has to be sent again."""
    if result.name != renewal.name:
        return None
    if result.status == 200 and not isinstance(result.validity_ms, Unset):
        extension = extension_of(result)
        return sent, extension.deadline(sent, renewal.ttl), extension.waiters
    failed = failure_of(result)
    if failed.problem is not None and is_loss(failed.problem):
        return loss_of(failed.problem, renewal.name)
    if failed.pause is not None:
        raise failed
    return None
