"""The guard: a held lock that is extended in the background, and whose loss is reported."""

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
from .errors import LockLostError, Loss, RefusedError, UnavailableError

log = logging.getLogger("redlock_gateway")


class _Body:
    """The body of an ``async with``, cancelled on a loss. It counts cancellations as
    asyncio.timeout does.
    """

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "async with needs a task"
        self._task: asyncio.Task[Any] = task
        self._loop = asyncio.get_running_loop()
        self._cancelling = task.cancelling() if hasattr(task, "cancelling") else 0
        self._ended = False
        self._is_cancelled = False

    def on_loss(self, _: Loss) -> None:
        # The loop may be closed by now.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if not self._ended:
            self._is_cancelled = True
            self._task.cancel()

    def end(self) -> bool:
        """Returns whether a CancelledError from the body is due to the loss alone."""
        self._ended = True
        if not self._is_cancelled:
            return False
        return not hasattr(self._task, "uncancel") or self._task.uncancel() <= self._cancelling


class Guard:
    """A held lock, or a held set of locks, extended at a third of its validity until it is released
    or lost. The guard extends all locks of a set by one request, and the set is lost with any of them.

    ``with guard:`` and ``async with guard:`` release the lock at the end. After a loss the block
    raises LockLostError, even if the work succeeded. A loss cancels the body of an ``async with`` at
    once. A dropped guard is released in the background. A guard cannot stop work that does not
    check it: give ``fencing_token`` to each resource you write to.
    """

    def __init__(self, held: Held) -> None:
        self._held = held
        self._body: _Body | None = None
        # The end of the interpreter does not wait for a release: the lock then ends with its TTL.
        weakref.finalize(self, held.drop).atexit = False

    def __repr__(self) -> str:
        # Leaves out the token, which is a secret.
        return f"<Guard of {self.name!r}, {self.remaining:.1f} s to its deadline>"

    @property
    def name(self) -> str:
        """The lock's name. For a set it has all names, separated by commas."""
        return self._held.name

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the locks: one, or those of the set."""
        return self._held.target.names

    @property
    def token(self) -> str:
        """The secret that extends and releases the lock."""
        return self._held.token

    @property
    def fencing_token(self) -> int:
        """A number larger than that of every earlier grant of this lock; below 2**53.

        Give it to the resource with every write, and let the resource refuse smaller ones:
        ``UPDATE … SET …, fence = :token WHERE id = :id AND fence <= :token``.
        """
        return self._held.fencing_token

    @property
    def slots_held(self) -> tuple[int, ...] | None:
        """The numbers of the slots that the guard holds, from 1; None for a lock without slots.

        No other holder has these numbers, so they may name what the holder uses, such as a port.
        """
        return self._held.slots_held

    @property
    def deadline(self) -> float:
        """The end of the validity on ``redlock_gateway.now()``. Until then the lock is ours, unless
        taken away.

        Each extension moves the deadline.
        """
        return self._held.lease[1]

    @property
    def remaining(self) -> float:
        """Seconds until the deadline, 0 after it."""
        return max(self.deadline - now(), 0.0)

    @property
    def waiters(self) -> int | None:
        """How many waited for the lock at the gateway at the last extension; None before it.

        A holder may release the lock early when somebody waits. Those who wait for any lock of a set
        count.
        """
        return self._held.waiters

    @property
    def lost(self) -> threading.Event:
        """Set on a loss, at the latest the margin before the deadline: ``guard.lost.wait(10)``."""
        return self._held.lost

    @property
    def loss(self) -> Loss | None:
        """Why the lock was lost, or None."""
        return self._held.loss

    def check(self) -> None:
        """Raises LockLostError unless the lock is ours at this moment, by the clock too."""
        loss = self._held.loss_now()
        if loss is None and self._held.is_released:
            loss = Loss("released", "it was released by its own guard")
        if loss is not None:
            raise LockLostError(loss, self.name)

    def on_lost(self, callback: Callable[[Loss], object]) -> None:
        """Calls the callback once on a loss, in its own thread; at once if the lock is lost
        already.

        For example to end a child process: ``guard.on_lost(lambda _: process.terminate())``. Its exceptions are logged.
        """
        self._held.on_lost(callback)

    async def wait_lost(self) -> Loss:
        """Waits for the loss, and returns it."""
        loop = asyncio.get_running_loop()
        lost: asyncio.Future[Loss] = loop.create_future()

        def resolve(loss: Loss) -> None:
            if not lost.done():
                lost.set_result(loss)

        def notify(loss: Loss) -> None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(resolve, loss)

        self._held.listen(notify)
        try:
            return await lost
        finally:
            self._held.forget(notify)

    def wait_extended(self, timeout: float | None = None) -> bool:
        """Waits for the next confirmed extension. Returns False on a loss, or after ``timeout``
        seconds.
        """
        held = self._held
        with held.extended:
            before = held.extensions
            held.extended.wait_for(lambda: held.extensions > before or held.lost.is_set(), timeout)
            return held.extensions > before

    def release(self) -> None:
        """Releases the lock, trying for 5 s at most. Raises nothing if it is no longer held: call
        check() before.

        Raises UnavailableError if no gateway confirmed the release (the lock then ends with its TTL), and RefusedError.
        """
        if self._held.process == os.getpid():
            background().run(self._held.release(), to_the_end=True)

    async def arelease(self) -> None:
        """Does the same as release(), for asyncio. After a cancellation the release goes on in the
        background.
        """
        if self._held.process == os.getpid():
            await background().arun(self._held.release(), to_the_end=True)

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        loss = self._held.loss_now()
        try:
            self.release()
        except (RefusedError, UnavailableError) as failed:
            self._not_released(failed)
        _raise_lost(self.name, loss, error)

    async def __aenter__(self) -> Guard:
        self._body = _Body()
        self._held.listen(self._body.on_loss)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        loss = self._held.loss_now()
        body, self._body = self._body, None
        assert body is not None, "left what was not entered"
        self._held.forget(body.on_loss)
        is_ours = body.end()
        try:
            await self.arelease()
        except (RefusedError, UnavailableError) as failed:
            self._not_released(failed)
        _raise_lost(self.name, loss, error, is_ours)

    def _not_released(self, why: Exception) -> None:
        # The lock was ours until the work was done, so a failed release is no error. The lock ends
        # with its TTL.
        log.warning("the lock was not released, and ends with its TTL: %s", why)


def _raise_lost(name: str, loss: Loss | None, error: BaseException | None, is_ours: bool = False) -> None:
    # SystemExit, KeyboardInterrupt and cancellations by others pass unchanged, as does LockLostError.
    if loss is None or isinstance(error, LockLostError):
        return
    if error is None or isinstance(error, Exception) or is_ours:
        raise LockLostError(loss, name) from error
