"""The results of requests about several locks: one for each lock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from ._api.models import ExtendResult, ReleaseResult
from ._api.types import UNSET, Unset
from ._ask import Failure, deadline_of, is_retryable
from .errors import Problem

Result = TypeVar("Result", ExtendResult, ReleaseResult)


@dataclass(frozen=True)
class Extension:
    """An extended lease; durations are in seconds."""

    validity: float
    elapsed: float
    # How many wait for the lock at the gateway; None if the answer does not tell.
    waiters: int | None

    def deadline(self, sent: float, ttl: float) -> float:
        """Returns the moment until which the lease may be trusted."""
        return deadline_of(self.validity, self.elapsed, sent, ttl)


def in_order(results: Sequence[Result], names: Sequence[str]) -> Sequence[Result]:
    """Raises ValueError unless there is a result for each name."""
    if [each.name for each in results] != list(names):
        raise ValueError("a result for each lock was expected")
    return results


def extension_of(result: ExtendResult) -> Extension:
    """Reads the result for an extended lock. Raises ValueError if it has no validity."""
    if isinstance(result.validity_ms, Unset):
        raise ValueError("a validity was expected")
    waiters = None if isinstance(result.waiters, Unset) else int(result.waiters)
    return Extension(int(result.validity_ms) / 1000, int(result.elapsed_ms) / 1000, waiters)


def failure_of(result: ExtendResult | ReleaseResult) -> Failure:
    """Reads the result for a lock for which the request has failed."""
    holder = result.holder if isinstance(result, ExtendResult) else UNSET
    after = result.retry_after_ms
    problem = Problem(
        status=int(result.status),
        code=str(result.code or ""),
        detail=str(result.detail or ""),
        retry_after=None if isinstance(after, Unset) else float(after) / 1000,
        holder=str(holder) if holder else None,
    )
    pause = (problem.retry_after or 0.0) if is_retryable(problem.status) else None
    return Failure(f"lock {result.name!r}: {problem}", problem, pause, result.name)
