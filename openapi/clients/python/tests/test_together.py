"""Guards of one client renew together. A proxy in front of a real gateway counts the requests."""

from __future__ import annotations

import time
import unittest
from collections.abc import Callable
from contextlib import ExitStack

import httpx
from proxy import Proxy
from servers import PATIENCE, Servers

from redlock_gateway import Client, Guard, LockLostError

# A busy machine may not run a process for seconds. A lock that is extended a third of this after its
# grant outlasts more than three of them.
TTL = 6.0
servers: Servers


def setUpModule() -> None:
    global servers
    servers = Servers()


def tearDownModule() -> None:
    servers.close()


class Together(unittest.TestCase):
    def setUp(self) -> None:
        self.name = self.id().rsplit(".", 1)[-1]
        self.opened = ExitStack()
        self.addCleanup(self.opened.close)

    def proxy(self, status: int = 0) -> tuple[Proxy, Client]:
        proxy = Proxy(servers.urls[0], status)
        self.opened.callback(proxy.close)
        client = Client(proxy.url)
        self.opened.callback(client.close)
        return proxy, client

    def acquired(self, client: Client, name: str, ttl: float = TTL) -> Guard:
        guard = client.lock(f"{self.name}/{name}", ttl=ttl).acquire()
        self.opened.callback(guard.release)
        return guard

    def until(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not is_so():
            self.assertLess(time.monotonic(), end, f"not within {PATIENCE} s")
            time.sleep(0.02)

    def extended(self, guards: list[Guard], times: int = 1) -> None:
        for _ in range(times):
            before = [guard.deadline for guard in guards]

            def all_extended(before: list[float] = before) -> bool:
                for guard in guards:
                    guard.check()
                return all(guard.deadline > then for guard, then in zip(guards, before, strict=True))

            self.until(all_extended)

    def test_fifty_guards_renew_by_few_requests_and_only_the_lost_one_is_lost(self) -> None:
        proxy, client = self.proxy()
        guards = [self.acquired(client, str(at)) for at in range(50)]
        self.extended(guards)
        joint_before, single_before = proxy.counts()
        begin = guards[0].deadline
        while guards[0].deadline - begin < 3 * TTL:
            self.extended(guards[:1])
        joint, single = proxy.counts()
        joint, single = joint - joint_before, single - single_before
        # One by one it would be 450 and more. Guards acquired one after the other form a few groups.
        self.assertTrue(0 < joint and joint + single <= 100, f"{joint} joint requests and {single} single ones")
        for guard in guards:
            guard.check()

        taken = guards.pop(7)
        url = f"{servers.urls[1]}/locks/{self.name}%2F7"
        # On a busy machine the masters may not answer in time (503).
        while httpx.delete(url, params={"force": "true"}, timeout=PATIENCE).status_code == 503:
            pass
        self.assertTrue(taken.lost.wait(PATIENCE))
        with self.assertRaises(LockLostError) as lost:
            taken.check()
        self.assertEqual(("gone", taken.name), (lost.exception.loss.kind, lost.exception.name))
        self.extended(guards)

    def test_guards_renew_alone_at_a_gateway_that_cannot_extend_many(self) -> None:
        for status in (404, 405):
            with self.subTest(status):
                proxy, client = self.proxy(status)
                guards = [self.acquired(client, f"{status}-{at}") for at in range(5)]
                self.extended(guards, 3)
                joint, single = proxy.counts()
                # Groups that are due at the same time may each ask once before the first answer.
                self.assertTrue(0 < joint <= 3, f"{joint} joint requests")
                self.assertGreaterEqual(single, 15)

    def test_a_hung_joint_renewal_loses_no_lock_and_holds_up_no_release(self) -> None:
        proxy, client = self.proxy()
        guards = [self.acquired(client, str(at)) for at in range(5)]
        proxy.answers_many.clear()
        self.until(lambda: proxy.counts()[0] > 0)
        released = guards.pop(0)
        begin = time.monotonic()
        released.release()
        # The proxy answers the joint renewal only after the test.
        self.assertLess(time.monotonic() - begin, 60)
        self.assertIsNone(released.loss)
        self.extended(guards)

    def test_each_result_counts_as_the_answer_to_its_own_request(self) -> None:
        proxy, client = self.proxy()
        guards = [self.acquired(client, str(at)) for at in range(5)]
        proxy.first = {"status": 503, "code": "outcome_unknown", "detail": "ask again"}
        self.until(lambda: proxy.first is None)
        self.extended(guards)

        proxy.first = {"status": 409, "code": "not_holder", "detail": "d", "holder": "mallory"}
        self.until(lambda: any(guard.loss for guard in guards))
        lost = [guard for guard in guards if guard.loss is not None]
        self.assertEqual([("taken", "mallory")], [(guard.loss.kind, guard.loss.holder) for guard in lost if guard.loss])
        self.extended([guard for guard in guards if guard not in lost])

    def test_guards_with_different_ttls_renew_in_different_requests(self) -> None:
        proxy, client = self.proxy()
        guards = [self.acquired(client, "a"), self.acquired(client, "b", ttl=TTL + 0.001)]
        self.extended(guards, 2)
        self.assertEqual(0, proxy.counts()[0])


if __name__ == "__main__":
    unittest.main()
