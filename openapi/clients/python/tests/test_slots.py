"""Locks with several holders, over real servers."""

from __future__ import annotations

import threading
import time
import unittest
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from servers import PATIENCE, Servers

from redlock_gateway import Client, LockHeldError, RefusedError

# A busy machine may not run a process for seconds. A lock that is extended a third of this after its
# grant outlasts more than three of them.
TTL = 6.0
servers: Servers


def setUpModule() -> None:
    global servers
    servers = Servers()


def tearDownModule() -> None:
    servers.close()


class Slots(unittest.TestCase):
    def setUp(self) -> None:
        self.name = self.id().rsplit(".", 1)[-1]
        self.client = Client(servers.urls)
        self.addCleanup(self.client.close)

    def is_free(self) -> bool:
        status = self.client.status(self.name)
        return status.state == "free" and not status.holders

    def test_two_of_three_guards_hold_two_slots(self) -> None:
        first = self.client.lock(self.name, ttl=TTL, slots=2, owner="first").acquire()
        second = self.client.lock(self.name, ttl=TTL, slots=2, owner="second").acquire()
        self.assertEqual([1, 2], sorted((first.slots_held or ()) + (second.slots_held or ())))
        for guard in [first, second] * 2:
            self.assertTrue(guard.wait_extended(PATIENCE), guard.loss)

        with self.assertRaises(LockHeldError) as held:
            self.client.lock(self.name, slots=2).acquire()
        holders = held.exception.holders or ()
        self.assertEqual([1, 2], [each.slot for each in holders])
        self.assertEqual({"first", "second"}, {each.holder for each in holders})
        status = self.client.status(self.name)
        self.assertEqual(2, status.slots)
        tokens = {each.fencing_token for each in status.holders or ()}
        self.assertEqual({first.fencing_token, second.fencing_token}, tokens)

        waits = threading.Event()
        lock = self.client.lock(self.name, slots=2, wait=PATIENCE, on_waiting=lambda _: waits.set())
        with ThreadPoolExecutor(1) as pool:
            third = pool.submit(lock.acquire)
            self.assertTrue(waits.wait(PATIENCE))
            second.release()
            guard = third.result()
        self.assertEqual(second.slots_held, guard.slots_held)
        guard.release()
        first.release()

    def test_takes_two_slots_or_none(self) -> None:
        both = self.client.lock(self.name, ttl=TTL, slots=2, take=2)
        with self.client.lock(self.name, slots=2):
            self.assertRaises(LockHeldError, both.acquire)
        guard = both.acquire()
        self.assertEqual((1, 2), guard.slots_held)
        self.assertTrue(guard.wait_extended(PATIENCE), guard.loss)
        self.client.force_release(self.name, slot=2)
        self.assertTrue(guard.lost.wait(PATIENCE))
        self.assertEqual("gone", guard.loss and guard.loss.kind)
        guard.release()
        self.assertTrue(self.is_free())
        with self.client.lock(f"{self.name}/single") as single:
            self.assertIsNone(single.slots_held)

    def test_refuses_numbers_that_no_lock_has(self) -> None:
        options: list[dict[str, int]] = [{"slots": 0}, {"slots": 257}, {"slots": 2, "take": 3}, {"take": 2}]
        for each in options:
            with self.subTest(each), self.assertRaises(RefusedError) as refused:
                self.client.lock(self.name, slots=each.get("slots"), take=each.get("take")).acquire()
            self.assertEqual(400, refused.exception.status)

    def test_unanswered_acquire_leaves_no_slot(self) -> None:
        for take in (None, 2):
            with self.subTest(take), Client(servers.proxy) as client:
                servers.do("swallow", count=1)
                servers.do("refuse", status=403)
                self.assertRaises(RefusedError, client.lock(self.name, slots=3, take=take, ttl=60).acquire)
                servers.do("refuse", status=0)
                self.until(self.is_free)

    def until(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not is_so():
            self.assertLess(time.monotonic(), end, f"not within {PATIENCE} s")
            time.sleep(0.02)


if __name__ == "__main__":
    unittest.main()
