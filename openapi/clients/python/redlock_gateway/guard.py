"""A lock that is held: extended in the background, and lost out loud."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from ._background import background
from ._held import Held
from .clock import now
from .errors import LockLost, Loss, Refused, Unavailable

log = logging.getLogger("redlock_gateway")


class _Body:
    """The body of an ``async with``, cancelled when the lock is lost. The counting is that of asyncio.timeout."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "async with needs a task"
        self._task: asyncio.Task[Any] = task
        self._loop = asyncio.get_running_loop()
        self._cancelling = task.cancelling() if hasattr(task, "cancelling") else 0
        self._ended = False
        self._is_cancelled = False

    def told(self, _: Loss) -> None:
        # Its loop may be closed by now.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if not self._ended:
            self._is_cancelled = True
            self._task.cancel()

    def end(self) -> bool:
        """Whether a CancelledError out of the body is ours alone."""
        self._ended = True
        if not self._is_cancelled:
            return False
        return not hasattr(self._task, "uncancel") or self._task.uncancel() <= self._cancelling


class Guard:
    """A lock that is held, and extended at a third of its validity until it is released or lost.

    ``with guard:`` and ``async with guard:`` release it at the end. When it was lost meanwhile, LockLost comes out of
    the block, also when the work has ended well; the body of an ``async with`` is cancelled at once. A guard that is
    dropped is released in the background. What it cannot do: stop work that does not look. Give ``fencing_token`` to
    whatever is written to.
    """

    def __init__(self, held: Held) -> None:
        self._held = held
        self._body: _Body | None = None
        # At the end of the interpreter nothing waits for it: a lock that was not released then lapses.
        weakref.finalize(self, held.drop).atexit = False

    def __repr__(self) -> str:
        # Without the token: it is a secret.
        return f"<Guard of {self.name!r}, {self.remaining:.1f} s to its deadline>"

    @property
    def name(self) -> str:
        """The lock's name."""
        return self._held.name

    @property
    def token(self) -> str:
        """The secret by which the lock is extended and released."""
        return self._held.token

    @property
    def fencing_token(self) -> int:
        """Larger than that of every earlier grant of this lock; below 2**53.

        Give it to the resource with every write, and let the resource refuse smaller ones:
        ``UPDATE … SET …, fence = :token WHERE id = :id AND fence <= :token``.
        """
        return self._held.fencing_token

    @property
    def deadline(self) -> float:
        """Until when the lock is certainly ours, unless it is taken away: seconds as of ``redlock_gateway.now()``.

        It moves on with each extension.
        """
        return self._held.lease[1]

    @property
    def remaining(self) -> float:
        """Seconds until the deadline, 0 when it has passed."""
        return max(self.deadline - now(), 0.0)

    @property
    def lost(self) -> threading.Event:
        """Set when the lock is lost, at the latest the margin before its deadline: ``guard.lost.wait(10)``."""
        return self._held.lost

    @property
    def loss(self) -> Loss | None:
        """Why it was lost, or None."""
        return self._held.loss

    def check(self) -> None:
        """Returns when the lock is ours at this moment, by the clock too. Raises LockLost when it is not."""
        loss = self._held.loss_now()
        if loss is None and self._held.is_released:
            loss = Loss("released", "it was released by its own guard")
        if loss is not None:
            raise LockLost(loss)

    def on_lost(self, callback: Callable[[Loss], object]) -> None:
        """Calls this once when the lock is lost, in a thread of its own; at once when it is lost already.

        To end a child process, for example: ``guard.on_lost(lambda _: process.terminate())``. What it raises is logged.
        """
        self._held.on_lost(callback)

    async def wait_lost(self) -> Loss:
        """Returns when the lock is lost, and says why."""
        loop = asyncio.get_running_loop()
        told: asyncio.Future[Loss] = loop.create_future()

        def resolve(loss: Loss) -> None:
            if not told.done():
                told.set_result(loss)

        def tell(loss: Loss) -> None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(resolve, loss)

        self._held.listen(tell)
        try:
            return await told
        finally:
            self._held.forget(tell)

    def wait_extended(self, timeout: float | None = None) -> bool:
        """Waits for the next confirmed extension. False when the lock was lost before, or after so many seconds."""
        held = self._held
        with held.extended:
            before = held.extensions
            held.extended.wait_for(lambda: held.extensions > before or held.lost.is_set(), timeout)
            return held.extensions > before

    def release(self) -> None:
        """Releases the lock, and tries for 5 s at most. Quiet when it is not held any more: ask check() before.

        Raises Unavailable when no gateway has confirmed it (it ends with its TTL then), and Refused.
        """
        if self._held.process == os.getpid():
            background().run(self._held.release(), to_the_end=True)

    async def arelease(self) -> None:
        """As release(), for asyncio. When it is cancelled the release goes on in the background."""
        if self._held.process == os.getpid():
            await background().arun(self._held.release(), to_the_end=True)

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        loss = self._held.loss_now()
        try:
            self.release()
        except (Refused, Unavailable) as failed:
            self._not_released(failed)
        _raise_lost(loss, error)

    async def __aenter__(self) -> Guard:
        self._body = _Body()
        self._held.listen(self._body.told)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        loss = self._held.loss_now()
        body, self._body = self._body, None
        assert body is not None, "left what was not entered"
        self._held.forget(body.told)
        is_ours = body.end()
        try:
            await self.arelease()
        except (Refused, Unavailable) as failed:
            self._not_released(failed)
        _raise_lost(loss, error, is_ours)

    def _not_released(self, why: Exception) -> None:
        # It was ours until the work was done; whatever becomes of the release, it ends with its TTL.
        log.warning("the lock %r was not released, and ends with its TTL: %s", self.name, why)


def _raise_lost(loss: Loss | None, error: BaseException | None, is_ours: bool = False) -> None:
    # Who ends the process, or cancels for a reason of their own, is not held up. A LockLost goes on as it is.
    if loss is None or isinstance(error, LockLost):
        return
    if error is None or isinstance(error, Exception) or is_ours:
        raise LockLost(loss) from error
