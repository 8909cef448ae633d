"""The client of one or several gateways, and the acquisition of locks."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import secrets
import ssl
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar, cast
from urllib.parse import urlsplit

from ._api.api.locks import get_lock, list_locks, release_lock
from ._api.types import UNSET, Response
from ._ask import ALL_TRIES, ONE_TRY, Failure, Gateways, Route, Send, grant, is_unreachable
from ._background import background
from ._held import Held, release_by_key
from ._place import Place, Waiting, default_owner
from ._target import LockSet, Single, Target
from ._together import Together
from .clock import now
from .errors import LockHeldError, RefusedError, SetupError, UnavailableError
from .guard import Guard
from .status import LockList, LockStatus, lock_list, lock_status

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

# All times are in seconds. A longer wait is split into several requests: many proxies end a request
# that is silent for half a minute.
_LONGEST_TURN = 20.0
_SHORTEST_TURN = 0.1
# The first request of a wait is short, so that the place in line is soon known.
_FIRST_TURN = 1.0
# The end of a timeout in which no answer waits any more: a tenth of it, and at most this.
_LAST_ANSWER = 0.5
# The same with several gateways, so that a hanging one cannot use up the time.
_TURN_OF_SEVERAL = 5.0
# For one request, in addition to its wait.
_ONE_TRY = 5.0
# How long to ask for a lock that no gateway decides about, also without a wait.
_UNDECIDED = 5.0
# The margin at the end of a lease, for work to stop, is a tenth of the TTL, and at most this.
_LONGEST_MARGIN = 2.0

_guard: ContextVar[Guard] = ContextVar("redlock_gateway.guard")


def current_guard() -> Guard:
    """Returns the guard of a function decorated with ``client.locked``. Raises LookupError
    elsewhere.
    """
    return _guard.get()


class Client:
    """A client of one or several gateways over the same masters. Threads and tasks may share it."""

    def __init__(
        self,
        url: str | Sequence[str],
        *,
        key: str | None = None,
        ssl_context: ssl.SSLContext | None = None,
        longest_turn: float | None = None,
    ) -> None:
        """Connects to nothing yet. Raises SetupError, with the value, if an argument cannot work.

        Args:
            url: One gateway or several. A path is kept: ``https://example.com/locks-of-team-a``.
            key: The API key.
            ssl_context: For https: your own authorities and client certificates.
            longest_turn: How many seconds one request may wait for a lock; a longer wait is split
                into several requests. By default 20, or 5 with several gateways.

        """
        urls = [_parsed(each) for each in ([url] if isinstance(url, str) else url)]
        if not urls:
            raise SetupError("no URL of a gateway was given, such as http://127.0.0.1:8080")
        if key is not None:
            key = key.strip()
            if not key or not all("!" <= character <= "~" for character in key):
                raise SetupError("the API key has characters that a header cannot contain")
        if ssl_context is None and any(each.startswith("https:") for each in urls):
            ssl_context = ssl.create_default_context()
        self._gateways = Gateways(urls, key, ssl_context)
        self._together = Together(self._gateways)
        turn = longest_turn if longest_turn is not None else _TURN_OF_SEVERAL if len(urls) > 1 else _LONGEST_TURN
        self._longest_turn = _span("longest_turn", turn)

    def lock(
        self,
        name: str,
        *,
        ttl: float = 30.0,
        wait: float = 0.0,
        owner: str | None = None,
        metadata: Mapping[str, str] | None = None,
        margin: float | None = None,
        timeout: float | None = None,
        on_waiting: Callable[[Waiting], object] | None = None,
        at_least: float = 0.0,
        priority: int | None = None,
        queue: Literal["all", "newest"] | None = None,
        slots: int | None = None,
        take: int | None = None,
    ) -> Lock:
        """Returns a lock to acquire: ``with client.lock("a") as guard:`` or ``async with``.

        Args:
            name: 1 to 255 bytes of ``[A-Za-z0-9._:@/+~-]``.
            ttl: How many seconds the lock outlives its holder. It is extended at a third of that.
            wait: How many seconds to wait while somebody else holds the lock; ``math.inf`` for no
                limit.
            owner: A label for people, shown to anybody who asks for the holder. By default
                ``user@host:pid program``; an empty text sends none.
            metadata: Stored beside the lock, for people.
            margin: How many seconds before its deadline a lock that could not be extended counts
                as lost. Set it to the time that your work needs to stop, less than half of the TTL.
                By default a tenth of the TTL, at most 2.
            timeout: How many seconds the whole acquisition may take, with its wait, and with tries
                at gateways that do not answer. By default ``wait`` and the time of several tries.
            on_waiting: Called while the acquisition waits, with the place in line and the holder:
                after a second, and then after each request. It runs in a thread of its own; while a
                call runs, there is no other.
            at_least: How many seconds from its grant on nobody else gets the lock, even if the guard
                releases it earlier. So a job runs once although the clocks of its hosts
                differ. At most the longest TTL of the gateway.
            priority: How early the request is served while it waits: 0 to 9, and 9 is served first.
                By default 5.
            queue: Which requests for the lock wait at the same time: by default all.
                With ``newest``, a newer request of this kind ends the wait with a RefusedError
                whose problem has the code ``superseded``.
            slots: How many may hold the lock at once: 1 to 256, for example the size of a pool.
                Everybody should give the same number, because the largest one in use is the bound.
                Without it the lock has one holder.
            take: How many of the ``slots`` this acquisition takes, all or none: by default 1.

        """
        options = (
            ("hold_at_least_ms", round(_span("at_least", at_least, name) * 1000) if at_least else None),
            ("priority", priority),
            ("queue", queue),
            ("slots", slots),
            ("take", take),
        )
        line = {key: value for key, value in options if value is not None}
        _named(name)
        return Lock(
            self._together,
            self._longest_turn,
            Single(name, slots, take),
            ttl,
            wait,
            owner,
            metadata,
            margin,
            timeout,
            on_waiting,
            line,
        )

    def locks(
        self,
        *names: str,
        ttl: float = 30.0,
        wait: float = 0.0,
        owner: str | None = None,
        metadata: Mapping[str, str] | None = None,
        margin: float | None = None,
        timeout: float | None = None,
        on_waiting: Callable[[Waiting], object] | None = None,
        at_least: float = 0.0,
        priority: int | None = None,
    ) -> Lock:
        """Returns a set of 1 to 32 locks to acquire, all together or none of them: ``with
        client.locks("a", "b") as guard:`` or ``async with``.

        While it waits it holds none of them, so sets that overlap cannot deadlock, in any order of
        names. The guard has one token and one fencing token for all locks. A LockHeldError has the held
        lock in ``held``. Arguments are those of lock().
        """
        for name in names:
            _named(name)
        target = LockSet(names)
        line: dict[str, Any] = {}
        if at_least:
            line["hold_at_least_ms"] = round(_span("at_least", at_least, target.label) * 1000)
        if priority is not None:
            line["priority"] = priority
        return Lock(
            self._together, self._longest_turn, target, ttl, wait, owner, metadata, margin, timeout, on_waiting, line
        )

    def locked(
        self,
        name: str,
        *,
        ttl: float = 30.0,
        wait: float = 0.0,
        owner: str | None = None,
        metadata: Mapping[str, str] | None = None,
        margin: float | None = None,
        timeout: float | None = None,
        on_waiting: Callable[[Waiting], object] | None = None,
        at_least: float = 0.0,
        priority: int | None = None,
        queue: Literal["all", "newest"] | None = None,
        slots: int | None = None,
        take: int | None = None,
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Decorates a function or coroutine function: each call runs under the lock. Arguments are
        those of lock().

        Inside the function ``current_guard()`` returns the guard. After a loss LockLostError is raised instead of
        returning the result.
        """
        lock = functools.partial(
            self.lock,
            name,
            ttl=ttl,
            wait=wait,
            owner=owner,
            metadata=metadata,
            margin=margin,
            timeout=timeout,
            on_waiting=on_waiting,
            at_least=at_least,
            priority=priority,
            queue=queue,
            slots=slots,
            take=take,
        )
        lock()

        def decorate(function: Callable[P, R]) -> Callable[P, R]:
            if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
                raise TypeError("a generator would run after its lock was released: use with inside of it")
            if inspect.iscoroutinefunction(function):

                @functools.wraps(function)
                async def arun(*args: P.args, **kwargs: P.kwargs) -> Any:
                    async with lock() as guard:
                        before = _guard.set(guard)
                        try:
                            return await function(*args, **kwargs)
                        finally:
                            _guard.reset(before)

                return cast("Callable[P, R]", arun)

            @functools.wraps(function)
            def run(*args: P.args, **kwargs: P.kwargs) -> R:
                with lock() as guard:
                    before = _guard.set(guard)
                    try:
                        return function(*args, **kwargs)
                    finally:
                        _guard.reset(before)

            return run

        return decorate

    def status(self, name: str) -> LockStatus:
        """Returns the state of a lock on the masters. Raises RefusedError, UnavailableError."""
        return background().run(self._status(name))

    async def astatus(self, name: str) -> LockStatus:
        """Does the same as status(), for asyncio."""
        return await background().arun(self._status(name))

    async def _status(self, name: str) -> LockStatus:
        _named(name)
        return await self._asked(
            lambda api: get_lock.asyncio_detailed(name, client=api), lambda answer: lock_status(answer.to_dict()), name
        )

    def list(self, prefix: str = "", *, limit: int = 100, cursor: str | None = None) -> LockList:
        """Returns a page of the held locks whose names begin with ``prefix``.

        Raises RefusedError, UnavailableError.

        Args:
            prefix: The beginning of the names; an empty text lists all locks.
            limit: How many locks a page has at most, 1 to 1000.
            cursor: ``next_cursor`` of the page before.

        """
        return background().run(self._list(prefix, limit, cursor))

    async def alist(self, prefix: str = "", *, limit: int = 100, cursor: str | None = None) -> LockList:
        """Does the same as list(), for asyncio."""
        return await background().arun(self._list(prefix, limit, cursor))

    async def _list(self, prefix: str, limit: int, cursor: str | None) -> LockList:
        return await self._asked(
            lambda api: list_locks.asyncio_detailed(
                client=api, prefix=prefix or UNSET, limit=limit, cursor=UNSET if cursor is None else cursor
            ),
            lambda answer: lock_list(answer.to_dict()),
            None,
        )

    def force_release(self, name: str, *, slot: int | None = None) -> None:
        """Takes a lock from its holder, whose guard reports the loss at its next extension.

        Of a lock with slots it takes ``slot``, by default 1. A holder of several slots loses the lock
        with any of them.

        Raises RefusedError with status 404 if nobody holds the lock; UnavailableError.
        """
        background().run(self._force_release(name, slot))

    async def aforce_release(self, name: str, *, slot: int | None = None) -> None:
        """Does the same as force_release(), for asyncio."""
        await background().arun(self._force_release(name, slot))

    async def _force_release(self, name: str, slot: int | None) -> None:
        _named(name)
        which = UNSET if slot is None else slot
        await self._asked(
            lambda api: release_lock.asyncio_detailed(name, client=api, force=True, slot=which), lambda _: None, name
        )

    async def _asked(self, send: Send, read: Callable[[Any], T], name: str | None) -> T:
        answer, _ = await self._gateways.ask(send, read, now() + ALL_TRIES, ONE_TRY, name=name, hope=now())
        return answer

    def close(self) -> None:
        """Closes the connections. Release all guards first, because none can be extended
        afterwards.
        """
        background().run(self._gateways.close())

    async def aclose(self) -> None:
        """Does the same as close(), for asyncio."""
        await background().arun(self._gateways.close())

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class Lock:
    """A lock or a set to acquire, made by ``client.lock`` or ``client.locks``. It may be entered
    again, also by several threads at once.
    """

    def __init__(
        self,
        together: Together,
        longest_turn: float,
        target: Target,
        ttl: float,
        wait: float,
        owner: str | None,
        metadata: Mapping[str, str] | None,
        margin: float | None,
        timeout: float | None,
        on_waiting: Callable[[Waiting], object] | None,
        line: dict[str, Any],
    ) -> None:
        name = target.label
        self._together, self._gateways = together, together.gateways
        self._longest_turn, self._target = longest_turn, target
        self._ttl = _span("ttl", ttl, name)
        if math.isnan(wait) or wait < 0:
            raise SetupError(f"wait is {wait} s; it has to be 0 or more", name)
        self._wait = wait
        self._margin = min(ttl / 10, _LONGEST_MARGIN) if margin is None else margin
        if not 0 <= self._margin < ttl / 2:
            raise SetupError(
                f"margin is {self._margin} s and has to be 0 or more, and less than half of the ttl of {ttl} s", name
            )
        self._timeout = math.inf
        if timeout is not None:
            self._timeout = _span("timeout", timeout, name)
            self._wait = min(wait, timeout - min(timeout / 10, _LAST_ANSWER))
        self._owner = owner
        self._metadata = dict(metadata) if metadata else None
        self._on_waiting = on_waiting
        self._line = line
        # The owner and guard of each open `with`. One lock may be open in several threads and
        # tasks.
        self._open: list[tuple[object, Guard]] = []
        self._mutex = threading.Lock()

    def acquire(self) -> Guard:
        """Acquires the lock, and keeps it until the guard is released or dropped.

        Raises LockHeldError, RefusedError with what is allowed, UnavailableError.
        """
        return background().run(self._acquire())

    async def aacquire(self) -> Guard:
        """Does the same as acquire(), for asyncio. A cancellation leaves the queue."""
        return await background().arun(self._acquire())

    def __enter__(self) -> Guard:
        guard = self.acquire()
        self._opened(guard)
        return guard.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed().__exit__(kind, error, trace)

    async def __aenter__(self) -> Guard:
        guard = await self.aacquire()
        self._opened(guard)
        return await guard.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._closed().__aexit__(kind, error, trace)

    def _opened(self, guard: Guard) -> None:
        with self._mutex:
            self._open.append((_who(), guard))

    def _closed(self) -> Guard:
        who = _who()
        with self._mutex:
            mine = [at for at, (whose, _) in enumerate(self._open) if whose == who]
            # Some frameworks leave in another task than they entered. With one open `with` it is
            # clear which to close.
            if not mine and len(self._open) != 1:
                raise RuntimeError("a lock was left by a task that had not entered it: call client.lock in each task")
            return self._open.pop(mine[-1] if mine else 0)[1]

    async def _acquire(self) -> Guard:
        # All repetitions use the same key, so each answer is about the same grant, and all turns of
        # a wait have the same place in line.
        idempotency_key = secrets.token_hex(16)
        route, posts, place = self._gateways.route(), _Posts(), Place(self._target.label, self._on_waiting)
        end = now() + self._timeout
        try:
            return await self._asked(idempotency_key, route, posts, place, end)
        except (RefusedError, UnavailableError, asyncio.CancelledError):
            # The lock may have been granted, and nobody has the token. That holds after lock_held
            # too: a gateway that still works on an unanswered POST may grant the lock when its
            # holder releases it. The release is safe, because it takes only grants of this key. It
            # also gives up a place in line.
            release = functools.partial(release_by_key, self._gateways, route, self._target, idempotency_key)
            if posts.may_be_granted and now() < end:
                await release()
            elif posts.may_be_granted or place.is_kept:
                background().start(release())
            raise

    async def _asked(self, idempotency_key: str, route: Route, posts: _Posts, place: Place, end: float) -> Guard:
        gateways, target = self._gateways, self._target
        count = len(gateways.urls)
        longest, first = self._longest_turn, _FIRST_TURN
        end_of_wait = now() + self._wait
        give_up = max(now() + _UNDECIDED, end_of_wait) + (min(longest, self._wait) + _ONE_TRY) * count
        give_up = min(give_up, end)
        labels: dict[str, Any] = {}
        if owner := default_owner() if self._owner is None else self._owner:
            labels["owner"] = owner
        if self._metadata:
            labels["metadata"] = self._metadata
        while (asked := now()) < give_up:
            turn = min(max(end_of_wait - asked, 0.0), longest, first)
            times = {"ttl_ms": round(self._ttl * 1000), "wait_ms": round(turn * 1000)}
            body = {**times, **self._line, **labels}
            try:
                granted, sent = await gateways.ask(
                    lambda api, body=body: posts.send(  # type: ignore[misc]
                        target.acquire(api, idempotency_key, body)
                    ),
                    grant,
                    give_up,
                    turn + _ONE_TRY,
                    name=target.label,
                    route=route,
                    hope=end_of_wait,
                )
            except RefusedError as refused:
                problem = refused.problem
                if problem.code == "invalid_wait" and longest > _SHORTEST_TURN:
                    longest = max(turn / 2, _SHORTEST_TURN)
                    continue
                if problem.code != "lock_held":
                    raise
                first = math.inf
                place.refused(gateways.urls[route.at], problem)
                if now() >= end_of_wait:
                    raise LockHeldError(problem, target.label) from None
                place.tell()
                # The answer came before the requested wait was over. Pause before the next request.
                if now() - asked < turn / 2:
                    pause = 1.0 if problem.retry_after is None else problem.retry_after
                    await asyncio.sleep(max(min(pause, end_of_wait - now()), 0.0))
                continue
            # The answer took longer than the lock lives. The next request extends the lock, or gets
            # a new grant.
            if granted.deadline(sent, self._ttl) > now():
                return Guard(Held(self._together, target, granted, sent, self._ttl, self._margin))
        raise UnavailableError(["answers took longer than the lock lives"], name=target.label)


class _Posts:
    """The POSTs of one acquire."""

    def __init__(self) -> None:
        self._sent = 0
        self._refused = 0

    @property
    def may_be_granted(self) -> bool:
        """Returns whether a POST may have been granted the lock: not every one was refused, or not
        sent.
        """
        return self._refused < self._sent

    async def send(self, post: Coroutine[Any, Any, Response[Any]]) -> Response[Any]:
        """Sends a POST, and counts it."""
        self._sent += 1
        try:
            return await post
        except Failure as failed:
            self._refused += failed.is_refusal
            raise
        except Exception as error:
            self._refused += is_unreachable(error)
            raise


def _who() -> object:
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return (threading.get_ident(), task)


def _span(what: str, seconds: float, name: str | None = None) -> float:
    if not math.isfinite(seconds) or seconds <= 0:
        raise SetupError(f"{what} is {seconds} s; it has to be finite and more than 0", name)
    return seconds


def _named(name: str) -> None:
    # Such a name would change the path of the URL. The gateway checks all other names.
    if name in ("", ".", ".."):
        raise SetupError(f"{name!r} is not a name of a lock: it would change the path of the URL")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise SetupError(f"{name!r} is not a name of a lock: {error}") from None


def _parsed(url: str) -> str:
    # Text before an @ may be a password.
    shown = url.rsplit("@", 1)[-1]
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise SetupError(f"{shown!r} is not a URL of a gateway: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise SetupError(
            f"{shown!r} is not a URL of a gateway: it has to begin with http:// or https://, and name a host"
        )
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise SetupError(f"{shown!r} is not a URL of a gateway: only scheme, host, port and path are allowed")
    return url.rstrip("/")
