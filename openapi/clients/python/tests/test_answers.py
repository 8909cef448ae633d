"""What an answer means, without servers."""

from __future__ import annotations

import unittest
from typing import Any

import httpx

from redlock_gateway import now
from redlock_gateway._ask import Grant, failure, grant, loss_of


def answered(status: int, body: Any = None, **headers: str) -> httpx.Response:
    request = httpx.Request("POST", "http://gateway/locks/a")
    if isinstance(body, str):
        return httpx.Response(status, text=body, headers=headers, request=request)
    return httpx.Response(status, json=body, headers=headers, request=request)


def problem(status: int, code: str, **more: Any) -> httpx.Response:
    return answered(status, {"type": "t", "title": "t", "status": status, "code": code, "detail": "d", **more})


class Answers(unittest.TestCase):
    def test_what_may_go_well_the_next_time_is_told_from_what_may_not(self) -> None:
        for status, code in [(503, "outcome_unknown"), (429, "rate_limited"), (500, "internal_error"), (503, "new")]:
            self.assertEqual(0.007, failure(problem(status, code, retry_after_ms=7)).pause)
        for status, code in [(400, "invalid_ttl"), (401, "unauthenticated"), (409, "lock_held"), (418, "new")]:
            self.assertIsNone(failure(problem(status, code, retry_after_ms=7)).pause)

    def test_a_page_of_a_proxy_is_no_word_of_a_gateway(self) -> None:
        self.assertEqual(3, failure(answered(503, "<html>", **{"Retry-After": "3"})).pause)
        self.assertEqual(0, failure(answered(502, "<html>")).pause)
        lost = failure(answered(404, "<html>"))
        assert lost.problem is not None
        self.assertEqual((None, "not_a_gateway"), (lost.pause, lost.problem.code))
        for body in [[], 1, None, {"status": 404}, {"status": "x", "code": "lock_not_found", "detail": "d"}]:
            unknown = failure(answered(404, body)).problem
            assert unknown is not None
            self.assertEqual("not_a_gateway", unknown.code)

    def test_a_loss_says_why(self) -> None:
        def kind(status: int, code: str, **more: Any) -> str:
            said = failure(problem(status, code, **more)).problem
            assert said is not None
            return f"{loss_of(said).kind} {loss_of(said).holder}"

        self.assertEqual("gone None", kind(404, "lock_not_found"))
        self.assertEqual("taken bob", kind(409, "not_holder", holder="bob"))
        self.assertEqual("max_hold None", kind(409, "max_hold_reached"))

    def test_a_deadline_counts_from_the_moment_of_sending(self) -> None:
        sent = now() - 7
        granted = Grant("t", 1, validity=29, elapsed=5)
        self.assertAlmostEqual(34, granted.deadline(sent, 30) - sent)
        boasts = Grant("t", 1, validity=1e9, elapsed=1e9)
        self.assertLess(boasts.deadline(sent, 30) - sent, 38)

    def test_what_is_no_lease_is_no_grant(self) -> None:
        nothings: list[object] = [None, {}, "lease"]
        for nothing in nothings:
            self.assertRaises(ValueError, grant, nothing)


if __name__ == "__main__":
    unittest.main()
