"""The renewal of a lock. It runs in the background thread, except for the values that a guard
reads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress

from ._ask import LONGEST_TRY, ONE_TRY, SHORTEST_TRY, Gateways, Grant, Route, is_loss, limit_of_a_try, loss_of
from ._target import Target
from ._together import Renewal, Renewed, Together
from .clock import now, reached
from .errors import Loss, RefusedError, UnavailableError

log = logging.getLogger("redlock_gateway")

# How long a release is tried, in seconds. Finished work does not wait longer; the lock then ends
# with its TTL.
_LONGEST_RELEASE = 5.0


async def release_until(gateways: Gateways, target: Target, token: str, until: float) -> None:
    """Releases a lock or a set. If it is no longer held it counts as released, because a repeated
    request may find that.
    """
    try:
        await gateways.ask(
            lambda api: target.release(api, token=token), target.read_released, until, ONE_TRY, name=target.label
        )
    except RefusedError as refused:
        if not is_loss(refused.problem):
            raise


async def release_by_key(gateways: Gateways, route: Route, target: Target, idempotency_key: str) -> None:
    """Releases the grants of unanswered requests with this key. Without an answer the lock ends
    with its TTL.
    """
    with suppress(RefusedError, UnavailableError):
        await gateways.ask(
            lambda api: target.release(api, key=idempotency_key),
            target.read_released,
            now() + ONE_TRY,
            ONE_TRY,
            name=target.label,
            route=route,
        )


class Held:
    """The state of a renewal. It has no reference to the guard, so that a dropped guard can be
    freed.
    """

    def __init__(
        self, together: Together, target: Target, granted: Grant, sent: float, ttl: float, margin: float
    ) -> None:
        self.together, self.gateways = together, together.gateways
        self.target, self.name, self.ttl, self.margin = target, target.label, ttl, margin
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
        target, ttl_ms = self.target, round(self.ttl * 1000)
        while True:
            confirmed, deadline = self.lease
            interval = (deadline - confirmed) / 3
            given_up = deadline - self.margin
            due = confirmed + interval
            renewed: Renewed = None
            if target.is_joint:
                renewed = await self.together.renew(Renewal(self.name, self.token, self.ttl, interval, due, given_up))
            else:
                await reached(due)
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
                    extensions, sent = await self.gateways.ask(
                        lambda api: target.extend(api, self.token, ttl_ms),
                        target.read_extended,
                        given_up,
                        one_try,
                        name=self.name,
                    )
                except RefusedError as refused:
                    if is_loss(refused.problem):
                        return loss_of(refused.problem, refused.name)
                    # For example an expired key. The lock is ours until its deadline; the cause may
                    # be fixed by then.
                    heard, has_said = str(refused.problem), True
                except UnavailableError as unavailable:
                    # Keep an answer of a gateway rather than a later timeout: it says more.
                    if unavailable.problem is not None or not has_said:
                        heard, has_said = "; ".join(unavailable.heard), unavailable.problem is not None
                else:
                    deadline = min(each.deadline(sent, self.ttl) for each in extensions)
                    waiters = [each.waiters for each in extensions if each.waiters is not None]
                    self._extended(sent, deadline, sum(waiters) if waiters else None)
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
        log.warning("lock %r: the lock was lost: %s", loss.name or self.name, loss)

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
            await release_until(self.gateways, self.target, self.token, until)
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
