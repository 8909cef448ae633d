"""Sets of locks, over real servers."""

from __future__ import annotations

import asyncio
import threading
import time
import unittest
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from proxy import Proxy
from servers import PATIENCE, Servers

from redlock_gateway import Client, Guard, LockHeldError, LockLostError, RefusedError, _api
from redlock_gateway._api.api.locks import acquire_locks, create_request, get_request
from redlock_gateway._api.models import AcquireSetBody, DeferBody, RequestStatus, SetLease

# A busy machine may not run a process for seconds. A lock that is extended a third of this after its
# grant outlasts more than three of them.
TTL = 6.0
servers: Servers


def setUpModule() -> None:
    global servers
    servers = Servers()


def tearDownModule() -> None:
    servers.close()


class Sets(unittest.TestCase):
    def setUp(self) -> None:
        prefix = self.id().rsplit(".", 1)[-1]
        self.names = (f"{prefix}/staging", f"{prefix}/production")
        self.client = Client(servers.urls)
        self.addCleanup(self.client.close)

    def proxy(self) -> tuple[Proxy, Client]:
        proxy = Proxy(servers.urls[0])
        self.addCleanup(proxy.close)
        client = Client(proxy.url)
        self.addCleanup(client.close)
        return proxy, client

    def are_free(self) -> bool:
        return all(self.client.status(name).state == "free" for name in self.names)

    def until(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not is_so():
            self.assertLess(time.monotonic(), end, f"not within {PATIENCE} s")
            time.sleep(0.02)

    def extended(self, guard: Guard) -> None:
        self.assertTrue(guard.wait_extended(PATIENCE), guard.loss)

    def test_excludes_each_of_its_locks_and_the_reverse(self) -> None:
        with self.client.locks(*self.names, owner="deploy") as guard:
            self.assertEqual((self.names, ", ".join(self.names)), (guard.names, guard.name))
            for name in self.names:
                with self.assertRaises(LockHeldError) as held:
                    self.client.lock(name).acquire()
                self.assertEqual("deploy", held.exception.holder)
                self.assertEqual(guard.fencing_token, self.client.status(name).fencing_token)
        self.assertTrue(self.are_free())

        single = self.client.lock(self.names[1], owner="alone").acquire()
        with self.assertRaises(LockHeldError) as held:
            self.client.locks(*self.names).acquire()
        self.assertEqual([(self.names[1], "alone")], [(each.name, each.holder) for each in held.exception.held or ()])
        self.assertEqual("free", self.client.status(self.names[0]).state)
        waits = threading.Event()
        locks = self.client.locks(*self.names, wait=PATIENCE, on_waiting=lambda _: waits.set())
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(locks.acquire)
            self.assertTrue(waits.wait(PATIENCE))
            single.release()
            waiting.result().release()

    def test_is_held_for_five_times_its_ttl_by_joint_requests(self) -> None:
        proxy, client = self.proxy()
        with client.locks(*self.names, ttl=TTL) as guard:
            begin = guard.deadline
            while guard.deadline - begin < 5 * TTL:
                self.extended(guard)
                for name in self.names:
                    self.assertEqual(guard.fencing_token, self.client.status(name).fencing_token)
            self.assertEqual((0, 0), (guard.waiters, proxy.counts()[1]))

    def test_is_lost_with_any_of_its_locks(self) -> None:
        for taken in self.names:
            with self.subTest(taken):
                with self.assertRaises(LockLostError) as lost, self.client.locks(*self.names, ttl=TTL) as guard:
                    self.client.force_release(taken)
                    self.assertTrue(guard.lost.wait(PATIENCE))
                self.assertEqual(("gone", taken), (lost.exception.loss.kind, lost.exception.name))
                self.until(self.are_free)

    def test_loss_cancels_the_body_of_async_with(self) -> None:
        async def work() -> None:
            async with self.client.locks(*self.names, ttl=TTL):
                await self.client.aforce_release(self.names[0])
                await asyncio.sleep(PATIENCE)

        with self.assertRaises(LockLostError):
            asyncio.run(work())

    def test_deadline_moves_when_all_locks_are_extended(self) -> None:
        proxy, client = self.proxy()
        guard = client.locks(*self.names, ttl=TTL).acquire()
        for status in (503, 403):
            proxy.first = {"status": status, "code": "c", "detail": "ask again"}
            self.until(lambda: proxy.first is None)
            self.extended(guard)

        def is_lost() -> bool:
            # From here on, one of the two locks is never extended.
            proxy.first = {"status": 503, "code": "c", "detail": "ask again"}
            return guard.lost.is_set()

        self.until(is_lost)
        with self.assertRaises(LockLostError) as lost:
            guard.check()
        self.assertEqual(("unconfirmed", guard.name), (lost.exception.loss.kind, lost.exception.name))
        self.assertIn(self.names[0], lost.exception.loss.detail)
        guard.release()

    def test_is_released_also_when_nobody_answered(self) -> None:
        with Client(servers.proxy) as client:
            servers.do("swallow", count=1)
            guard = client.locks(*self.names).acquire()
            servers.do("swallow", count=1)
            guard.release()
            self.assertTrue(self.are_free())
            servers.do("swallow", count=1)
            servers.do("refuse", status=403)
            self.assertRaises(RefusedError, client.locks(*self.names, ttl=60).acquire)
            servers.do("refuse", status=0)
            self.until(self.are_free)

    def test_gateway_refuses_names_that_make_no_set(self) -> None:
        for names in ([], ["a", "a"], ["a", "ä"]):
            with self.subTest(names):
                self.assertRaises(RefusedError, self.client.locks(*names).acquire)


class Requests(unittest.TestCase):
    def test_generated_code_creates_a_request_and_claims_its_set(self) -> None:
        names, key = ["deferred/staging", "deferred/production"], "python-request-number-1"
        with _api.Client(base_url=servers.urls[0]) as api:
            body = DeferBody(names=names)
            created = create_request.sync_detailed(client=api, body=body, idempotency_key=key)
            self.assertEqual(202, created.status_code)
            request = created.parsed
            assert isinstance(request, RequestStatus)
            self.assertEqual(("ready", names), (request.state, request.names))
            claim = AcquireSetBody(names=names)
            claimed = acquire_locks.sync(client=api, body=claim, idempotency_key=key)
            assert isinstance(claimed, SetLease), claimed
            now = get_request.sync(request.id, client=api)
            assert isinstance(now, RequestStatus), now
            self.assertEqual("claimed", now.state)


if __name__ == "__main__":
    unittest.main()
