"""Waits in turns, and acquisitions that nobody answers."""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
import unittest
import unittest.mock
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from typing import Any

from servers import PATIENCE, Servers
from test_refusals import scripted

from redlock_gateway import Client, LockHeldError, SetupError, UnavailableError, Waiting
from redlock_gateway._ask import Gateways

# The answer to a turn of a wait. The short pause makes the test fast.
TURN = {"retry_after_ms": 10, "holder": "A", "acquired_at": "2026-01-02T03:04:05.678Z", "queue_place_expires_ms": 10000}


def nowhere() -> str:
    """A URL where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return f"http://127.0.0.1:{closed.getsockname()[1]}"


class Lines(logging.Handler):
    """The log lines of the library. Another thread writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: queue.Queue[str] = queue.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.put(record.getMessage())


class Turns(unittest.TestCase):
    def test_turns_of_a_wait_have_one_key_and_one_gateway(self) -> None:
        held = (409, {**TURN, "queue_position": 2})
        told: queue.Queue[Waiting] = queue.Queue()
        with (
            scripted(POST=[held, held, held, 201], DELETE=[204]) as first,
            scripted(POST=[201], DELETE=[204]) as second,
            Client([first.url, second.url]) as client,
            client.lock("a", wait=60, on_waiting=told.put, priority=9, queue="newest"),
        ):
            pass
        for body in first.bodies[:4]:
            self.assertEqual((9, "newest"), (body["priority"], body["queue"]))
        self.assertEqual(["POST"] * 4 + ["DELETE"], [method for method, _ in first.seen])
        self.assertEqual([], second.seen)
        self.assertEqual(1, len({key for _, key in first.seen[:4]}))
        self.assertEqual([1000, 5000, 5000], [body["wait_ms"] for body in first.bodies[:3]])
        since = datetime(2026, 1, 2, 3, 4, 5, 678000, timezone.utc)
        self.assertEqual(Waiting("a", 2, "A", since, first.url), told.get(timeout=PATIENCE))

    def test_guard_shows_the_waiters_of_the_last_extension(self) -> None:
        with scripted(POST=[201], PATCH=[200], DELETE=[204]) as server, Client(server.url) as client:
            guard = client.lock("a", ttl=6).acquire()
            self.assertIsNone(guard.waiters)
            self.assertTrue(guard.wait_extended(PATIENCE))
            self.assertEqual(2, guard.waiters)
            guard.release()

    def test_lost_place_is_said_once(self) -> None:
        log = logging.getLogger("redlock_gateway")
        lines = Lines()
        log.addHandler(lines)
        self.addCleanup(log.removeHandler, lines)
        with (
            scripted(POST=[(409, {**TURN, "queue_position": 3}), 0]) as first,
            scripted(
                POST=[(409, {**TURN, "queue_position": 7}), (409, {**TURN, "queue_position": 6}), 201], DELETE=[204]
            ) as second,
            Client([first.url, second.url]) as client,
            client.lock("a", wait=60),
        ):
            self.assertEqual(
                f"lock 'a': place in line lost: {first.url} does not answer; now 7th in line at {second.url}",
                lines.lines.get(timeout=PATIENCE),
            )
        self.assertTrue(lines.lines.empty())

    def test_failed_wait_gives_its_place_up(self) -> None:
        held = (409, {**TURN, "queue_position": 2})
        with scripted(POST=[held], DELETE=[204]) as server, Client(server.url) as client:
            with self.assertRaises(LockHeldError) as raised:
                client.lock("a", wait=0.1).acquire()
            self.assertEqual(("a", 2, "A"), (raised.exception.name, raised.exception.position, raised.exception.holder))
            end = time.monotonic() + PATIENCE
            while server.seen[-1][0] != "DELETE":
                self.assertLess(time.monotonic(), end)
                time.sleep(0.01)
            self.assertEqual(server.seen[0][1], server.seen[-1][1])

    def test_blocking_on_waiting_delays_no_grant(self) -> None:
        held = (409, {**TURN, "queue_position": 2})
        is_over = threading.Event()
        self.addCleanup(is_over.set)
        calls: list[Waiting] = []

        def block(waiting: Waiting) -> None:
            calls.append(waiting)
            is_over.wait()

        with (
            scripted(POST=[held, held, held, 201], DELETE=[204]) as server,
            Client(server.url) as client,
            client.lock("a", wait=60, on_waiting=block),
        ):
            self.assertEqual(1, len(calls))


class Nobody(unittest.TestCase):
    def test_nothing_listening_is_said_at_once(self) -> None:
        urls = [nowhere(), nowhere()]
        tries: list[int] = []
        real = Gateways._try

        async def counted(gateways: Gateways, send: Any, at: int, until: float) -> Any:
            tries.append(at)
            return await real(gateways, send, at, until)

        with unittest.mock.patch.object(Gateways, "_try", counted), Client(urls) as client:
            asks: list[Callable[[], object]] = [client.lock("a").acquire, lambda: client.status("a"), client.list]
            for ask in asks:
                tries.clear()
                with self.assertRaises(UnavailableError) as raised:
                    ask()
                # Who asks again later asks each gateway more than once.
                self.assertEqual([0, 1], sorted(tries))
                for url in urls:
                    self.assertIn(f"{url}: Connection refused", str(raised.exception))

    def test_wait_outlasts_a_gateway_that_is_not_there(self) -> None:
        with Client(nowhere()) as client:
            begin = time.monotonic()
            self.assertRaises(UnavailableError, client.lock("a", wait=3).acquire)
            took = time.monotonic() - begin
            # A client that awaits an answer as long as from a hung gateway gives up after 11 s.
            self.assertTrue(3 <= took < 10, took)

    def test_timeout_bounds_the_whole_acquisition(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            urls = [f"http://127.0.0.1:{silent.getsockname()[1]}"] * 2
            with Client(urls) as client:
                begin = time.monotonic()
                with self.assertRaisesRegex(UnavailableError, "lock 'a': .* did not answer within"):
                    client.lock("a", wait=PATIENCE, timeout=1).acquire()
                self.assertLess(time.monotonic() - begin, 60)
                for timeout in [0, -1, float("nan"), float("inf")]:
                    with self.assertRaisesRegex(SetupError, f"lock 'a': timeout is {timeout} s"):
                        client.lock("a", timeout=timeout)


class Line(unittest.TestCase):
    servers: Servers

    @classmethod
    def setUpClass(cls) -> None:
        cls.servers = Servers()
        cls.addClassCleanup(cls.servers.close)

    def test_first_come_is_first_served_over_several_turns(self) -> None:
        """A begins to wait before B. Both wait for more than three turns, with two URLs each."""
        places: queue.Queue[tuple[str, Waiting]] = queue.Queue()
        order: list[str] = []

        def wait(who: str) -> None:
            with Client(self.servers.urls, longest_turn=1) as client:
                with client.lock("fifo", wait=60, owner=who, on_waiting=lambda waiting: places.put((who, waiting))):
                    order.append(who)

        def place(who: str, turns: int) -> Waiting:
            while True:
                whose, waiting = places.get(timeout=PATIENCE)
                turns -= whose == who
                if turns == 0:
                    return waiting

        with Client(self.servers.urls[0]) as holder:
            held = holder.lock("fifo", owner="holder").acquire()
            first = threading.Thread(target=wait, args=["A"])
            first.start()
            self.assertEqual("holder", place("A", 1).holder)
            second = threading.Thread(target=wait, args=["B"])
            second.start()
            waiting = place("B", 4)
            self.assertEqual((2, self.servers.urls[0]), (waiting.position, waiting.gateway))
            self.assertEqual(["A", "B"], [each.owner for each in holder.status("fifo").waiters])
            held.release()
            first.join(PATIENCE)
            second.join(PATIENCE)
        self.assertEqual(["A", "B"], order)

    def test_twenty_waiters_are_served_in_order_after_five_turns(self) -> None:
        turns = threading.Semaphore(0)
        order: list[str] = []

        def wait(who: str, count: Callable[[Waiting], object] | None) -> None:
            with Client(self.servers.urls, longest_turn=1) as client:
                with client.lock("twenty", wait=120, owner=who, on_waiting=count):
                    order.append(who)

        names = [f"waiter-{number}" for number in range(20)]
        with Client(self.servers.urls[0]) as holder, ThreadPoolExecutor(len(names)) as threads:
            held = holder.lock("twenty").acquire()
            results = []
            for number, who in enumerate(names, 1):
                is_last = number == len(names)
                results.append(threads.submit(wait, who, (lambda _: turns.release()) if is_last else None))
                self.until(lambda so_far=number: holder.status("twenty").waiters_total == so_far)  # type: ignore[misc]
            for _ in range(5):
                self.assertTrue(turns.acquire(timeout=PATIENCE))
            self.assertEqual(names, [each.owner for each in holder.status("twenty").waiters])
            held.release()
            for result in results:
                result.result(4 * PATIENCE)
        self.assertEqual(names, order)

    def test_waiters_of_a_killed_gateway_are_told_and_served(self) -> None:
        log = logging.getLogger("redlock_gateway")
        lines = Lines()
        log.addHandler(lines)
        self.addCleanup(log.removeHandler, lines)
        first, second = self.servers.urls
        told: queue.Queue[Waiting] = queue.Queue()

        def wait() -> None:
            with Client([first, second], longest_turn=1) as client:
                with client.lock("killed", wait=120, on_waiting=told.put):
                    pass

        with Client(second) as holder, ThreadPoolExecutor(2) as threads:
            held = holder.lock("killed").acquire()
            results = [threads.submit(wait) for _ in range(2)]
            self.assertEqual({first}, {told.get(timeout=PATIENCE).gateway for _ in results})
            with self.servers.during("kill-gateway", "start-gateway", index=0):
                for _ in results:
                    said = lines.lines.get(timeout=PATIENCE)
                    self.assertRegex(said, f"place in line lost: {first} does not answer; now .* in line at {second}")
                held.release()
                for result in results:
                    result.result(PATIENCE)
        self.assertTrue(lines.lines.empty())

    def until(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not is_so():
            self.assertLess(time.monotonic(), end)
            time.sleep(0.01)

    def test_timeout_leaves_time_to_say_who_holds_the_lock(self) -> None:
        with Client(self.servers.urls) as client, client.lock("held", owner="alice"):
            # A busy machine may need more time for the answer than the client leaves.
            answers: list[Exception] = []

            def is_answered() -> bool:
                begin = time.monotonic()
                try:
                    client.lock("held", wait=PATIENCE, timeout=3).acquire()
                except UnavailableError:
                    return False
                except LockHeldError as held:
                    answers.append(held)
                self.assertTrue(2 < time.monotonic() - begin < 60)
                return True

            self.until(is_answered)
            self.assertRegex(str(answers[0]), "lock 'held': .*\"alice\"")


if __name__ == "__main__":
    unittest.main()
