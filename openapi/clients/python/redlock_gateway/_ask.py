"""Asks one of several gateways until one answers, and decides whether to ask again."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import ssl
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from . import _api
from ._api.models import Lease, SetLease
from ._api.types import Response
from ._background import Background, background, left_behind
from .clock import finished, now
from .errors import Loss, Problem, RefusedError, UnavailableError
from .status import held_locks, moment, seconds, slot_holders

T = TypeVar("T")
Api = _api.AuthenticatedClient | _api.Client
Send = Callable[[Api], Coroutine[Any, Any, Response[Any]]]

log = logging.getLogger("redlock_gateway")

# All times are in seconds.
# The first and the longest pause between two rounds over all gateways.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
# How long an idle connection is kept, so that an extension needs no name server. A gateway keeps it
# for 75 s.
_IDLE = 70.0
# After this time without a connection the next gateway is asked.
_CONNECT = 2.0
# With less time no answer can be expected, and earlier answers say more than a missing one.
SHORTEST_TRY = 0.05
# For requests that no lease waits for.
ONE_TRY, ALL_TRIES = 2.0, 5.0
# One try to extend takes a quarter of the remaining time, so that a hung gateway cannot use up the
# lease, and at most this.
LONGEST_TRY = 5.0
_SHARE_OF_A_TRY = 4

# Codes of a gateway for a token that no longer holds its lock. A proxy's error page has a status,
# but no code.
_LOSSES = {"lock_not_found", "not_holder", "max_hold_reached"}


@dataclass(frozen=True)
class Grant:
    """The part of a granted or extended lease that a guard needs."""

    # A secret, so that a traceback with local variables leaves it out.
    token: str = field(repr=False)
    fencing_token: int
    validity: float
    elapsed: float
    # How many wait for the lock at the gateway; None if the answer does not tell.
    waiters: int | None = None
    # The slots of the lock that are held; None if the answer does not tell.
    slots_held: tuple[int, ...] | None = None

    def deadline(self, sent: float, ttl: float) -> float:
        """Returns the moment until which the grant may be trusted.

        ``sent`` is when the request was sent, ``ttl`` the TTL it asked for.
        """
        return deadline_of(self.validity, self.elapsed, sent, ttl)


def deadline_of(validity: float, elapsed: float, sent: float, ttl: float) -> float:
    """Returns the moment until which a lease may be trusted.

    Time on the network counts against the validity. Time in the gateway does not, because the
    gateway computes the validity afterwards. An answer with more than ``ttl``, or with more elapsed
    time than has passed, is cut to these.
    """
    return sent + min(elapsed, now() - sent) + min(validity, ttl)


def grant(answer: object) -> Grant:
    """Reads a lease. Raises ValueError if the answer is none."""
    if not isinstance(answer, Lease | SetLease):
        raise ValueError("a lease was expected")
    token, fencing_token = answer.token, int(answer.fencing_token)
    if not (token.isascii() and token.replace(".", "").replace("-", "").isalnum()):
        raise ValueError("its token is malformed")
    waiters, slots = None, None
    if isinstance(answer, Lease):
        waiters = answer.waiters if isinstance(answer.waiters, int) else None
        slots = tuple(answer.slots_held) if isinstance(answer.slots_held, list) else None
    return Grant(token, fencing_token, int(answer.validity_ms) / 1000, int(answer.elapsed_ms) / 1000, waiters, slots)


def is_retryable(status: int) -> bool:
    """Returns whether a repeated request may succeed. The next gateway may not have this one's
    defect (500).
    """
    return status in (408, 429, 500, 502, 503, 504)


def limit_of_a_try(left: float) -> float:
    """Returns the limit for one try to extend, of the time left."""
    return min(max(left / _SHARE_OF_A_TRY, SHORTEST_TRY), LONGEST_TRY)


def is_loss(problem: Problem | None) -> bool:
    """Returns whether the token no longer holds its lock."""
    return problem is not None and problem.code in _LOSSES


def loss_of(problem: Problem, name: str | None = None) -> Loss:
    """Returns the loss that a refused extension reports."""
    if problem.status == 404:
        return Loss("gone", f"it was released by somebody else or has expired ({problem.detail})", name=name)
    if problem.code == "max_hold_reached":
        return Loss("max_hold", f"it was held for the longest time that is allowed ({problem.detail})", name=name)
    return Loss("taken", f"{problem.holder or 'somebody else'} holds it", problem.holder, name)


class Failure(Exception):
    """A failed try. ``pause`` is the time before the next one, in seconds; None if it would be
    refused again. ``name`` is the lock of a set that the problem is about.
    """

    def __init__(
        self, text: str, problem: Problem | None = None, pause: float | None = 0.0, name: str | None = None
    ) -> None:
        super().__init__(text)
        self.problem = problem
        self.pause = pause
        self.name = name

    @property
    def is_refusal(self) -> bool:
        """Returns whether a gateway refused the request, so that it granted nothing. A page of a
        proxy leaves that open.
        """
        problem = self.problem
        return problem is not None and problem.code != "not_a_gateway" and 400 <= problem.status < 500


def failure(response: httpx.Response) -> Failure:
    """Reads an answer that is no success, and whose body has arrived.

    The body is read leniently, because the generated code would reject a whole answer with an
    unknown code.
    """
    status, url = response.status_code, str(response.request.url)
    try:
        body = response.json()
        problem: Problem | None = Problem(
            status=int(body["status"]),
            code=str(body["code"]),
            detail=str(body["detail"]),
            request_id=_text(body.get("request_id")),
            retry_after=seconds(body.get("retry_after_ms")),
            holder=_text(body.get("holder")),
            expires_in=seconds(body.get("expires_in_ms")),
            acquired_at=moment(body.get("acquired_at")),
            holders=slot_holders(body.get("holders")),
            held=held_locks(body.get("held")),
            queue_position=_whole(body.get("queue_position")),
            queue_place_expires=seconds(_whole(body.get("queue_place_expires_ms"))),
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        problem = None
    may_pass = is_retryable(status)
    if problem is not None:
        # The next gateway may not have this one's defect.
        return Failure(str(problem), problem, (problem.retry_after or 0.0) if may_pass else None)
    # A proxy's own page. Some proxies send Retry-After.
    detail = f"{url} answered {status}, but not as a gateway does"
    if not may_pass or status == 500:
        return Failure(detail, Problem(status, "not_a_gateway", detail), 0.0 if may_pass else None)
    after = response.headers.get("Retry-After", "")
    return Failure(detail, pause=float(after) if after.isascii() and after.isdigit() else 0.0)


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) else None


def is_unreachable(error: BaseException) -> bool:
    """Returns whether there was no connection, so that no request was sent."""
    return isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)


def _words(error: BaseException) -> str:
    inner: BaseException = error
    while (earlier := inner.__cause__ or inner.__context__) is not None:
        inner = earlier
    if isinstance(inner, ConnectionError) and inner.errno is not None:
        return os.strerror(inner.errno)
    return f"{type(error).__name__}: {error}"


async def _raise_failure(response: httpx.Response) -> None:
    if not response.is_success:
        await response.aread()
        raise failure(response)


@dataclass
class Route:
    """The gateway that an acquisition asks: it stays there while that gateway answers."""

    at: int


class Gateways:
    """One or several gateways over the same masters. All methods run in the background thread."""

    def __init__(self, urls: list[str], key: str | None, context: ssl.SSLContext | None) -> None:
        self.urls = urls
        self._key = key
        self._context = context
        self._current = 0
        self._apis: list[Api] = []
        self._thread: Background | None = None

    def _api(self, at: int) -> Api:
        # A forked child has its own thread, and needs its own connections.
        if self._thread is not background():
            left_behind.append(self._apis)
            self._thread, self._apis = background(), [self._new(url) for url in self.urls]
        return self._apis[at]

    def _new(self, url: str) -> Api:
        options: dict[str, Any] = {
            # ask() limits the whole try; httpx can limit only its parts.
            "timeout": httpx.Timeout(None, connect=_CONNECT),
            "verify_ssl": self._context or False if url.startswith("https:") else False,
            # A redirect would send the token to another host.
            "follow_redirects": False,
            "httpx_args": {
                "event_hooks": {"response": [_raise_failure]},
                # A proxy from the environment would be a hidden dependency of each lock.
                "trust_env": False,
                # Waiting requests must not keep an extension from being sent.
                "limits": httpx.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=_IDLE),
            },
        }
        if self._key is None:
            return _api.Client(base_url=url, **options)
        return _api.AuthenticatedClient(base_url=url, token=self._key, **options)

    async def ask(
        self,
        send: Send,
        read: Callable[[Any], T],
        until: float,
        one_try: float,
        *,
        name: str | None,
        route: Route | None = None,
        hope: float = float("inf"),
    ) -> tuple[T, float]:
        """Asks one gateway after the other until one answers, with pauses.

        Returns the answer, and when its request was sent. A gateway may execute a request twice, so
        it must be idempotent. ``route`` keeps several requests at one gateway. After ``hope`` it
        asks no further round if no gateway has accepted a connection so far. Raises RefusedError
        and UnavailableError about the lock or set ``name``.
        """
        route = route or self.route()
        pause = _FIRST_PAUSE
        is_anybody_there = False
        while True:
            heard: list[str] = []
            problem: Problem | None = None
            soonest = float("inf")
            for _ in self.urls:
                at = route.at
                sent = now()
                if heard and until - sent < SHORTEST_TRY:
                    break
                try:
                    return read(await self._try(send, at, min(sent + one_try, until))), sent
                except Failure as failed:
                    is_anybody_there = True
                    if failed.pause is None and failed.problem is not None:
                        raise RefusedError(failed.problem, failed.name or name) from None
                    log.debug("asking the next gateway after %s: %s", self.urls[at], failed)
                    problem = failed.problem or problem
                    soonest = min(soonest, failed.pause or 0.0)
                    heard.append(str(failed))
                except Exception as error:
                    # After an error of a library below it is unknown whether the request was
                    # executed.
                    is_anybody_there = is_anybody_there or not is_unreachable(error)
                    log.debug("asking the next gateway after %s: %r", self.urls[at], error)
                    soonest = 0.0
                    heard.append(f"{self.urls[at]}: {_words(error)}")
                route.at = (at + 1) % len(self.urls)
                # Another request may have moved on to the next gateway meanwhile.
                if self._current == at:
                    self._current = route.at
            rest = max(pause * random.uniform(0.5, 1.5), soonest)
            if not is_anybody_there:
                rest = min(rest, hope - now())
            if rest <= 0 or rest + SHORTEST_TRY >= until - now():
                raise UnavailableError(heard, problem, name)
            await asyncio.sleep(rest)
            pause = min(pause * 2, _LONGEST_PAUSE)

    def route(self) -> Route:
        """Returns a route that begins at the gateway that answered last."""
        return Route(self._current)

    async def _try(self, send: Send, at: int, until: float) -> Any:
        begin = now()
        task = asyncio.create_task(send(self._api(at)))
        try:
            if not await finished(task, until):
                raise Failure(f"{self.urls[at]} did not answer within {max(until - begin, 0.0):.1f} s")
            return task.result().parsed
        finally:
            task.cancel()

    async def close(self) -> None:
        """Closes the connections."""
        if self._thread is background():
            for api in self._apis:
                await api.get_async_httpx_client().aclose()
