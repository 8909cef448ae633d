"""The renewal of a lock. It runs in the background thread, except for the values that a guard
reads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ._api.api.locks import extend_lock, release_lock
from ._api.models import ExtendBody
from ._api.types import UNSET
from ._ask import LONGEST_TRY, ONE_TRY, SHORTEST_TRY, Gateways, Grant, Route, grant, is_loss, limit_of_a_try, loss_of
from ._together import Renewal, Together
from .clock import now
from .errors import Loss, RefusedError, UnavailableError

log = logging.getLogger("redlock_gateway")

# How long a release is tried, in seconds. Finished work does not wait longer; the lock then ends
# with its TTL.
_LONGEST_RELEASE = 5.0


async def release_until(gateways: Gateways, name: str, token: str, until: float) -> None:
    """Releases a lock. A lock that is no longer held counts as released, because a repeated request
    may find that.
    """
    try:
        await gateways.ask(
            lambda api: release_lock.asyncio_detailed(name, client=api, lock_token=token),
            lambda _: None,
            until,
            ONE_TRY,
            name=name,
        )
    except RefusedError as refused:
        if not is_loss(refused.problem):
            raise


async def release_by_key(
    gateways: Gateways, route: Route, name: str, idempotency_key: str, line: Mapping[str, Any]
) -> None:
    """Releases the grants of unanswered requests with this key. Without an answer the lock ends
    with its TTL. ``line`` has the ``slots`` and ``take`` of the requests, if any.
    """
    slots, take = line.get("slots", UNSET), line.get("take", UNSET)
    with suppress(RefusedError, UnavailableError):
        await gateways.ask(
            lambda api: release_lock.asyncio_detailed(
                name, client=api, idempotency_key=idempotency_key, slots=slots, take=take
            ),
            lambda _: None,
            now() + ONE_TRY,
            ONE_TRY,
            name=name,
            route=route,
        )


class Held:
    """The state of a renewal. It has no reference to the guard, so that a dropped guard can be
    freed.
    """

    def __init__(self, together: Together, name: str, granted: Grant, sent: float, ttl: float, margin: float) -> None:
        self.together, self.gateways = together, together.gateways
        self.name, self.ttl, self.margin = name, ttl, margin
        self.token, self.fencing_token = granted.token, granted.fencing_token
        self.slots_held = granted.slots_held
        # When the lease was last confirmed, and its deadline. Replaced as a whole, so readers need
        # no mutex.
        self.lease = (sent, granted.deadline(sent, ttl))
        # The waiters that the last extension has told.
        self.waiters: int | None = None
        self.extended = threading.Condition()
        self.extensions = 0
        self.lost = threading.Event()
        self.loss: Loss | None = None
        self.is_released = False
        self.is_done = False
        self.process = os.getpid()
        self._loop = asyncio.get_running_loop()
        self._listening = threading.Lock()
        self._listeners: list[Callable[[Loss], None]] = []
        self.renewal = self._loop.create_task(self._renew())

    async def _renew(self) -> None:
        try:
            self._lose(await self._extend_until_lost())
        except BaseException as error:
            # A lock must not look held after its renewal has ended.
            self._lose(Loss("unconfirmed", f"the renewal has failed: {error!r}"))

    async def _extend_until_lost(self) -> Loss:
        body = ExtendBody.from_dict({"ttl_ms": round(self.ttl * 1000)})
        while True:
            confirmed, deadline = self.lease
            interval = (deadline - confirmed) / 3
            given_up = deadline - self.margin
            renewed = await self.together.renew(
                Renewal(self.name, self.token, self.ttl, interval, confirmed + interval, given_up)
            )
            if isinstance(renewed, Loss):
                return renewed
            if renewed is not None:
                self._extended(*renewed)
                continue
            heard, has_said = "it was too late to ask", False
            while True:
                left = given_up - now()
                if left < SHORTEST_TRY:
                    return Loss("unconfirmed", f"no gateway has confirmed an extension before its deadline: {heard}")
                one_try = limit_of_a_try(left)
                try:
                    granted, sent = await self.gateways.ask(
                        lambda api: extend_lock.asyncio_detailed(
                            self.name, client=api, body=body, lock_token=self.token
                        ),
                        grant,
                        given_up,
                        one_try,
                        name=self.name,
                    )
                except RefusedError as refused:
                    if is_loss(refused.problem):
                        return loss_of(refused.problem)
                    # For example an expired key. The lock is ours until its deadline; the cause may
                    # be fixed by then.
                    heard, has_said = str(refused.problem), True
                except UnavailableError as unavailable:
                    # Keep an answer of a gateway rather than a later timeout: it says more.
                    if unavailable.problem is not None or not has_said:
                        heard, has_said = "; ".join(unavailable.heard), unavailable.problem is not None
                else:
                    self._extended(sent, granted.deadline(sent, self.ttl), granted.waiters)
                    break
                await asyncio.sleep(max(min((given_up - now()) / 8, LONGEST_TRY), 0.0))

    def _extended(self, sent: float, deadline: float, waiters: int | None) -> None:
        self.waiters = waiters
        # The deadline never moves back: an older answer may promise more.
        self.lease = (sent, max(deadline, self.lease[1]))
        with self.extended:
            self.extensions += 1
            self.extended.notify_all()

    def _lose(self, loss: Loss) -> None:
        if self.is_released:
            return
        with self._listening:
            self.loss = loss
            listeners, self._listeners = self._listeners, []
        self.lost.set()
        with self.extended:
            self.extended.notify_all()
        for listener in listeners:
            listener(loss)
        log.warning("lock %r: the lock was lost: %s", self.name, loss)

    def on_lost(self, callback: Callable[[Loss], object]) -> None:
        """Calls the callback in its own thread. It may block without delaying other locks."""
        self.listen(lambda loss: _call(self.name, callback, loss))

    def listen(self, listener: Callable[[Loss], None]) -> None:
        """Calls the listener in the background thread, or at once after a loss. It must neither
        block nor raise.
        """
        with self._listening:
            loss = self.loss
            if loss is None:
                self._listeners.append(listener)
        if loss is not None:
            listener(loss)

    def forget(self, listener: Callable[[Loss], None]) -> None:
        with self._listening, suppress(ValueError):
            self._listeners.remove(listener)

    def loss_now(self) -> Loss | None:
        """Returns the loss, by the clock too. Takes no mutex, so it is right in a forked child and
        after a pause.
        """
        if self.loss is None and self.lease[1] <= now():
            return Loss("unconfirmed", "its deadline has passed without an extension")
        return self.loss

    async def release(self) -> None:
        self.is_released = True
        self.renewal.cancel()
        if self.is_done:
            return
        until = min(max(self.lease[1], now() + 1.0), now() + _LONGEST_RELEASE)
        try:
            await release_until(self.gateways, self.name, self.token, until)
        except UnavailableError:
            if self.loss is None:
                raise
        self.is_done = True

    def drop(self) -> None:
        async def release() -> None:
            try:
                await self.release()
            except Exception as error:
                log.warning("lock %r: it was not released, and ends with its TTL: %s", self.name, error)

        # A garbage collection may call this anywhere, so it takes no mutex. A forked child has no
        # part in the lock.
        if not self.is_released and self.process == os.getpid():
            asyncio.run_coroutine_threadsafe(release(), self._loop)


def _call(name: str, callback: Callable[[Loss], object], loss: Loss) -> None:
    def call() -> None:
        try:
            callback(loss)
        except BaseException:
            log.exception("lock %r: a callback of on_lost has failed", name)

    try:
        threading.Thread(target=call, name="redlock-gateway-lost", daemon=True).start()
    except RuntimeError:
        # No thread can be started. The callback runs here, late.
        call()
