"""The scenarios that every guard runs, in whatever language, over real servers; then what is Python's own."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gc
import json
import logging
import os
import pickle
import pprint
import socket
import sys
import threading
import time
import unittest
import unittest.mock
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
from servers import PATIENCE, Servers

from redlock_gateway import (
    Client,
    Guard,
    LockHeldError,
    LockLostError,
    Loss,
    RefusedError,
    SetupError,
    UnavailableError,
    current_guard,
)
from redlock_gateway._ask import Grant
from redlock_gateway._background import background

# A busy machine may not run a process for seconds. A lock that is extended a third of this after its
# grant outlasts more than three of them.
TTL = 6.0
servers: Servers


def setUpModule() -> None:
    global servers
    servers = Servers()


def tearDownModule() -> None:
    servers.close()


def take_away(guard: Guard) -> None:
    """By somebody else, with its own token."""
    url = f"{servers.urls[1]}/locks/{guard.name}"
    # On a busy machine the masters may not answer in time (503). Asked again, they may have released
    # the lock already (404).
    headers = {"Lock-Token": guard.token}
    while (status := httpx.delete(url, headers=headers, timeout=PATIENCE).status_code) == 503:
        pass
    assert status in (204, 404), status


def take_away_quietly(guard: Guard) -> None:
    """The same, by what writes no line into a log."""
    request = urllib.request.Request(f"{servers.urls[1]}/locks/{guard.name}", method="DELETE")
    request.add_header("Lock-Token", guard.token)
    urllib.request.urlopen(request, timeout=PATIENCE).close()


class Scenario(unittest.TestCase):
    def setUp(self) -> None:
        self.name = self.id().rsplit(".", 1)[-1]
        self.client = Client(servers.urls)
        self.addCleanup(self.client.close)

    def extended(self, guard: Guard, times: int) -> None:
        for _ in range(times):
            self.assertTrue(guard.wait_extended(PATIENCE), guard.loss)

    def until(self, is_so: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not is_so():
            self.assertLess(time.monotonic(), end, f"not within {PATIENCE} s")
            time.sleep(0.02)

    def is_free(self) -> bool:
        # On a busy machine it may be unknown for a moment.
        return self.client.status(self.name).state == "free"

    def lost(self, guard: Guard) -> Loss:
        self.assertTrue(guard.lost.wait(PATIENCE), "it is told")
        assert guard.loss is not None
        return guard.loss


class Guards(Scenario):
    def test_holds_for_five_times_its_ttl_and_leaves_nothing(self) -> None:
        with self.client.lock(self.name, ttl=TTL, owner="host-7", metadata={"run": "17"}) as guard:
            begin = guard.deadline
            while guard.deadline - begin < 5 * TTL:
                self.extended(guard, 1)
                guard.check()
                status = self.client.status(self.name)
                self.assertEqual(("host-7", guard.fencing_token), (status.owner, status.fencing_token))
        self.assertEqual("free", self.client.status(self.name).state)

    def test_status_and_list_have_none_for_what_is_absent(self) -> None:
        status = self.client.status(self.name)
        self.assertEqual((None, None, None, ()), (status.owner, status.metadata, status.expires_in, status.waiters))
        assert status.nodes is not None
        self.assertEqual(3, len(status.nodes))
        with self.client.lock(self.name, owner="host-7", metadata={"run": "17"}) as guard:
            page = self.client.list(self.name[:-1])
            self.assertEqual((None, 1), (page.next_cursor, len(page.locks)))
            held = page.locks[0]
            self.assertEqual(
                (self.name, "held", "host-7", {"run": "17"}, guard.fencing_token, None, None),
                (held.name, held.state, held.owner, held.metadata, held.fencing_token, held.key, held.nodes),
            )
            assert held.acquired_at is not None and held.expires_in is not None
            self.assertTrue(0 < held.expires_in <= 30 and held.acquired_at.utcoffset() is not None)
            next_page = asyncio.run(self.client.alist(self.name, limit=1))
            self.assertEqual([self.name], [each.name for each in next_page.locks])
            self.assertEqual((), self.client.list("nothing/").locks)

    def test_force_release_takes_the_lock_away(self) -> None:
        guard = self.client.lock(self.name, ttl=TTL).acquire()
        self.client.force_release(self.name)
        self.assertEqual("gone", self.lost(guard).kind)
        with self.assertRaisesRegex(RefusedError, f"lock '{self.name}': lock_not_found"):
            self.client.force_release(self.name)

    def test_shows_no_token(self) -> None:
        with self.client.lock(self.name) as guard:
            with self.assertLogs("anybody") as said:
                logging.getLogger("anybody").warning("got %s %r", guard, guard)
            shown = [repr(guard), str(guard), f"{guard}", *said.output, pprint.pformat(guard), pprint.pformat([guard])]
            shown += [
                repr(guard._held),
                repr(vars(guard)),
                repr(Grant("1.secret", 1, 1.0, 0.0)),
                json.dumps(guard, default=repr),
            ]
            for each in shown:
                self.assertNotIn(guard.token, each)
                self.assertNotIn("1.secret", each)

    def test_is_told_of_the_loss_when_the_lock_is_taken_away(self) -> None:
        guard = self.client.lock(self.name, ttl=TTL).acquire()
        told: list[Loss] = []
        guard.on_lost(told.append)
        take_away(guard)
        loss = self.lost(guard)
        self.assertEqual("gone", loss.kind)
        with self.assertRaisesRegex(LockLostError, "released by somebody else"):
            guard.check()
        guard.release()
        self.until(lambda: told == [loss])

    def test_is_told_who_has_it_when_it_is_anothers(self) -> None:
        # Bob waits at the gateway of the release, so the lock is never free in between.
        with (
            self.assertRaises(LockLostError) as raised,
            Client(servers.urls[1]) as there,
            ThreadPoolExecutor(1) as thread,
            self.client.lock(self.name, ttl=TTL) as guard,
        ):
            bob = thread.submit(there.lock(self.name, owner="bob", wait=PATIENCE).acquire)
            self.until(lambda: there.status(self.name).waiters_total == 1)
            take_away(guard)
            self.lost(guard)
            bob.result(PATIENCE).release()
        self.assertEqual(("taken", "bob"), (raised.exception.loss.kind, raised.exception.loss.holder))

    def test_without_a_majority_of_masters_is_told_lost_before_the_deadline(self) -> None:
        # A busy machine may tell the test late, so the margin is long.
        guard = self.client.lock(self.name, ttl=2 * TTL, margin=2.5).acquire()
        self.extended(guard, 1)
        with servers.during("stop-masters", "continue-masters", count=2):
            loss = self.lost(guard)
            left = guard.remaining
        self.assertEqual("unconfirmed", loss.kind)
        # The last try ends by the gateway's 503, or before that by the guard's own time limit.
        self.assertRegex(loss.detail, "outcome_unknown|did not answer")
        self.assertGreater(left, 0.1, "the margin is 2.5 s")
        guard.release()

    def test_survives_a_killed_gateway(self) -> None:
        with self.client.lock(self.name, ttl=TTL) as guard:
            with servers.during("kill-gateway", "start-gateway", index=0):
                self.extended(guard, 2)
                guard.check()
            self.assertEqual(guard.fencing_token, self.client.status(self.name).fencing_token)

    def test_survives_a_hung_gateway(self) -> None:
        with self.client.lock(self.name, ttl=TTL) as guard:
            with servers.during("stop-gateway", "continue-gateway", index=0):
                self.extended(guard, 2)
                guard.check()
            self.assertEqual(guard.fencing_token, self.client.status(self.name).fencing_token)

    def test_answers_that_were_lost_lead_to_the_same_grant(self) -> None:
        with Client(servers.proxy) as client:
            servers.do("swallow", count=2)
            with client.lock(self.name) as guard:
                status = self.client.status(self.name)
                self.assertEqual(("held", guard.fencing_token), (status.state, status.fencing_token))
                servers.do("swallow", count=1)
            self.assertEqual("free", self.client.status(self.name).state)

    def test_a_gateway_that_refuses_connections_is_passed_over(self) -> None:
        with Client(["http://127.0.0.1:1", servers.urls[0]]) as client, client.lock(self.name):
            pass

    def test_twenty_contenders_on_an_unlocked_counter_never_overlap(self) -> None:
        each, counter = 5, 0

        def contend(n: int) -> None:
            nonlocal counter
            with Client(servers.urls[n % 2]) as client:
                for _ in range(each):
                    with client.lock(self.name, wait=4 * PATIENCE) as guard:
                        before = counter
                        time.sleep(0.001)  # Where there is no lock, others come between.
                        counter = before + 1
                        guard.check()

        with ThreadPoolExecutor(20) as threads:
            list(threads.map(contend, range(20)))
        self.assertEqual(20 * each, counter)

    def test_release_after_loss_is_quiet(self) -> None:
        guard = self.client.lock(self.name, ttl=TTL).acquire()
        take_away(guard)
        self.lost(guard)
        guard.release()
        guard.release()

    def test_work_that_ended_after_the_loss_is_reported_lost(self) -> None:
        with self.assertRaises(LockLostError), self.client.lock(self.name, ttl=TTL) as guard:
            take_away(guard)
            self.lost(guard)
        with self.assertRaises(LockLostError) as raised, self.client.lock(self.name, ttl=TTL) as guard:
            take_away(guard)
            self.lost(guard)
            raise ZeroDivisionError
        self.assertIsInstance(raised.exception.__cause__, ZeroDivisionError)

    def test_a_refusal_says_what_is_allowed(self) -> None:
        def refusal(key: str | None, name: str, ttl: float = 60) -> RefusedError:
            with Client(servers.keyed, key=key) as client, self.assertRaises(RefusedError) as raised:
                client.lock(name, ttl=ttl).acquire()
            return raised.exception

        for refused, status, code, what in [
            (refusal("rlk_nonsense", "jobs/a"), 401, "unauthenticated", "key"),
            (refusal(None, "jobs/a"), 401, "unauthenticated", "key"),
            (refusal(servers.key, "other/a"), 403, "forbidden", "acquire"),
            (refusal(servers.key, "jobs/ä"), 400, "invalid_name", "A-Za-z0-9"),
            (refusal(servers.key, "jobs/.."), 400, "invalid_name", ".."),
            (refusal(servers.key, "jobs/a", 3600), 400, "invalid_ttl", "300000"),
            (refusal(servers.key, "jobs/a", 0.001), 400, "invalid_ttl", "10"),
        ]:
            with self.subTest(str(refused)):
                self.assertEqual((status, code), (refused.status, refused.code))
                self.assertIn(what, refused.detail)
                self.assertIn(code, str(refused))
        with Client(servers.keyed, key=servers.key) as client, client.lock("jobs/a") as guard:
            self.assertEqual("jobs/a", guard.name)

    def test_what_cannot_work_is_told_before_anything_is_asked(self) -> None:
        for url in ["localhost:8080", "ftp://a", "http://user:secret@a", "http://a/?b", ""]:
            with self.assertRaises(SetupError) as raised:
                Client(url)
            self.assertNotIn("secret@", str(raised.exception))
        for setup in [
            lambda: Client([]),
            lambda: Client(servers.urls, key="a\nb"),
            lambda: self.client.lock(".."),
            lambda: self.client.lock("a", ttl=float("nan")),
            lambda: self.client.lock("a", wait=-1),
            lambda: self.client.locked("", wait=1),
        ]:
            self.assertRaises(SetupError, setup)
        for margin in [1, 2, 60, -1, float("nan")]:
            with self.assertRaisesRegex(SetupError, f"{margin} s .* less than half of the ttl of 2 s"):
                self.client.lock("a", ttl=2, margin=margin)
        self.client.lock("a", ttl=2, margin=0.99)

    def test_who_is_refused_is_told_who_holds_the_lock(self) -> None:
        with self.client.lock(self.name, owner="alice"):
            with self.assertRaisesRegex(LockHeldError, f"lock '{self.name}': .*\"alice\"") as raised:
                self.client.lock(self.name).acquire()
            held = raised.exception
            self.assertEqual(("alice", 409, "lock_held"), (held.holder, held.status, held.code))
            assert held.expires_in is not None and held.retry_after is not None
            again = pickle.loads(pickle.dumps(held))
            self.assertEqual((str(held), held.problem), (str(again), again.problem))

    def test_nobody_there_is_told_with_what_was_heard(self) -> None:
        with Client("http://127.0.0.1:1") as client, self.assertRaisesRegex(UnavailableError, "127.0.0.1:1"):
            client.status("a")

    def test_a_wait_in_turns_gets_the_lock(self) -> None:
        first = self.client.lock(self.name).acquire()
        with Client(servers.urls, longest_turn=0.2) as client, ThreadPoolExecutor(1) as thread:
            begin = time.monotonic()
            self.assertRaises(LockHeldError, client.lock(self.name, wait=0.5).acquire)
            self.assertGreater(time.monotonic() - begin, 0.45)
            second = thread.submit(client.lock(self.name, wait=PATIENCE).acquire)
            threading.Timer(0.7, first.release).start()
            with second.result(PATIENCE) as guard:
                self.assertGreater(guard.fencing_token, first.fencing_token)

    def test_a_wait_longer_than_the_gateway_allows_is_shortened(self) -> None:
        first = self.client.lock(self.name).acquire()
        with Client(servers.urls[0], longest_turn=60) as client, ThreadPoolExecutor(1) as thread:
            second = thread.submit(client.lock(self.name, wait=120).acquire)
            threading.Timer(0.3, first.release).start()
            second.result(PATIENCE).release()

    def test_a_guard_that_is_dropped_releases(self) -> None:
        guard = self.client.lock(self.name).acquire()
        token = guard.fencing_token
        del guard
        gc.collect()
        with self.client.lock(self.name, wait=PATIENCE) as guard:
            self.assertGreater(guard.fencing_token, token)

    def test_a_released_guard_does_not_say_that_it_holds(self) -> None:
        with self.client.lock(self.name) as guard:
            pass
        with self.assertRaisesRegex(LockLostError, "released by its own guard"):
            guard.check()
        self.assertFalse(guard.lost.is_set())

    def test_a_decorated_function_runs_under_the_lock(self) -> None:
        @self.client.locked(self.name, owner="decorated")
        def work(number: int) -> int:
            self.assertRaises(LockHeldError, self.client.lock(self.name).acquire)
            self.assertEqual(self.name, current_guard().name)
            return number + 1

        self.assertEqual((2, 3), (work(1), work(2)))
        self.assertRaises(LookupError, current_guard)
        with self.assertRaises(TypeError):
            self.client.locked(self.name)(lambda: (yield))

    def test_one_lock_is_open_in_several_threads(self) -> None:
        lock = self.client.lock(self.name, wait=PATIENCE)
        inside = 0

        def enter(_: int) -> None:
            nonlocal inside
            with lock:
                inside += 1
                self.assertEqual(1, inside)
                inside -= 1

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(enter, range(8)))

    @unittest.skipUnless(hasattr(os, "fork"), "needs fork")
    def test_a_forked_child_has_no_part_in_the_lock_and_may_acquire_its_own(self) -> None:
        with self.client.lock(self.name) as guard:
            child = os.fork()
            if child == 0:
                ended = 1
                try:
                    guard.release()
                    with self.client.lock(f"{self.name}/child"):
                        ended = 0
                finally:
                    os._exit(ended)
            self.assertEqual(0, os.waitpid(child, 0)[1])
            self.assertEqual(guard.fencing_token, self.client.status(self.name).fencing_token)


class Isolation(Scenario):
    """One background thread extends all locks: nothing that one of them meets may keep another from being told."""

    def two(self) -> tuple[Guard, Guard]:
        guards = [self.client.lock(f"{self.name}/{n}", ttl=TTL).acquire() for n in range(2)]
        for guard in guards:
            self.addCleanup(guard.release)
        return guards[0], guards[1]

    def test_a_callback_that_exits_leaves_the_other_locks_told(self) -> None:
        first, second = self.two()
        first.on_lost(lambda _: sys.exit(3))
        take_away(first)
        self.lost(first)
        self.extended(second, 1)
        take_away(second)
        self.lost(second)
        self.client.lock(self.name).acquire().release()

    def test_a_callback_that_blocks_leaves_the_other_locks_told(self) -> None:
        first, second = self.two()
        entered, end, told = threading.Event(), threading.Event(), threading.Event()
        self.addCleanup(end.set)

        def block(_: Loss) -> None:
            entered.set()
            end.wait()

        first.on_lost(block)
        first.on_lost(lambda _: told.set())
        take_away(first)
        self.assertTrue(entered.wait(PATIENCE))
        self.assertTrue(told.wait(PATIENCE), "another callback of the same lock")
        self.extended(second, 1)
        take_away(second)
        self.lost(second)

    def test_a_log_that_nobody_reads_leaves_all_locks_told(self) -> None:
        reads, writes = os.pipe()
        os.set_blocking(writes, False)
        fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, 4096)
        os.write(writes, b"x" * 4096)
        os.set_blocking(writes, True)
        stalled = logging.StreamHandler(os.fdopen(writes, "w"))
        root = logging.getLogger()
        level = root.level
        first, second = self.two()
        # httpx has a line at this level for each request.
        root.setLevel(logging.DEBUG)
        root.addHandler(stalled)
        try:
            self.extended(first, 1)
            take_away_quietly(first)
            self.lost(first)
            self.extended(second, 1)
            take_away_quietly(second)
            self.lost(second)
        finally:
            root.removeHandler(stalled)
            root.setLevel(level)
            os.close(reads)

    def test_the_background_thread_goes_on_after_an_exit_in_it(self) -> None:
        guard, _ = self.two()
        background().loop.call_soon_threadsafe(sys.exit, 3)
        self.extended(guard, 1)
        self.client.lock(self.name).acquire().release()


class Reachability(Scenario):
    def test_a_lock_is_extended_when_names_cannot_be_resolved_any_more(self) -> None:
        # Between two extensions the connection is idle for longer than httpx keeps it by itself, which is 5 s.
        with Client(f"http://localhost:{urlsplit(servers.urls[0]).port}") as client:
            guard = client.lock(self.name, ttl=18).acquire()
            with unittest.mock.patch("socket.getaddrinfo", side_effect=socket.gaierror("no name server")):
                self.assertRaises(OSError, socket.create_connection, ("localhost", 80))
                self.assertTrue(guard.wait_extended(PATIENCE), guard.loss)
                guard.check()
                guard.release()
        self.until(self.is_free)

    def test_leaving_the_block_without_a_gateway_takes_five_seconds_at_most(self) -> None:
        with contextlib.ExitStack() as stopped:
            with self.assertLogs("redlock_gateway", "WARNING") as said:
                # The longest TTL: a release that is tried until the deadline takes minutes.
                with self.client.lock(self.name, ttl=300):
                    for index in range(2):
                        servers.do("stop-gateway", index=index)
                        stopped.callback(servers.do, "continue-gateway", index=index)
                    begin = time.monotonic()
                took = time.monotonic() - begin
                # Another thread writes the line.
                self.until(lambda: bool(said.output))
        self.assertLess(took, 60)
        self.assertIn("ends with its TTL", "".join(said.output))

    def test_an_acquire_that_nobody_answered_leaves_no_lock(self) -> None:
        with Client(servers.proxy) as client:
            servers.do("swallow", count=1_000_000)
            try:
                self.assertRaises(UnavailableError, client.lock(self.name, ttl=60).acquire)
                self.until(self.is_free)
            finally:
                servers.do("swallow", count=0)

    def test_refusal_after_a_lost_answer_leaves_no_lock(self) -> None:
        with Client(servers.proxy) as client:
            servers.do("swallow", count=1)
            servers.do("refuse", status=403)
            try:
                self.assertRaises(RefusedError, client.lock(self.name, ttl=60).acquire)
                self.until(self.is_free)
            finally:
                servers.do("refuse", status=0)
                servers.do("swallow", count=0)

    def test_an_acquire_that_was_cancelled_leaves_no_lock(self) -> None:
        async def main() -> None:
            with self.assertRaises(asyncio.TimeoutError):
                await asyncio.wait_for(client.lock(self.name, ttl=60).aacquire(), 1)

        with Client(servers.proxy) as client:
            servers.do("swallow", count=1_000_000)
            try:
                asyncio.run(main())
                self.until(self.is_free)
            finally:
                servers.do("swallow", count=0)


class AsyncGuards(Scenario):
    def test_the_body_is_cancelled_when_the_lock_is_lost(self) -> None:
        async def work() -> None:
            async with self.client.lock(self.name, ttl=TTL) as guard:
                await asyncio.to_thread(take_away, guard)
                await asyncio.sleep(PATIENCE)

        with self.assertRaises(LockLostError) as raised:
            asyncio.run(work())
        self.assertEqual("gone", raised.exception.loss.kind)
        self.assertIsInstance(raised.exception.__cause__, asyncio.CancelledError)

    def test_work_that_swallowed_its_end_is_reported_lost(self) -> None:
        async def work() -> None:
            async with self.client.lock(self.name, ttl=TTL) as guard:
                await asyncio.to_thread(take_away, guard)
                try:
                    await asyncio.sleep(PATIENCE)
                except asyncio.CancelledError:
                    pass

        self.assertRaises(LockLostError, asyncio.run, work())

    def test_who_cancels_for_a_reason_of_their_own_gets_it(self) -> None:
        async def work(entered: asyncio.Event) -> None:
            async with self.client.lock(self.name):
                entered.set()
                await asyncio.sleep(PATIENCE)

        async def main() -> None:
            entered = asyncio.Event()
            task = asyncio.create_task(work(entered))
            await entered.wait()
            task.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await task
            self.assertEqual("free", (await self.client.astatus(self.name)).state)

        asyncio.run(main())

    def test_a_lock_is_kept_while_the_event_loop_is_blocked(self) -> None:
        async def work() -> None:
            async with self.client.lock(self.name, ttl=TTL) as guard:
                self.extended(guard, 4)  # It blocks the loop for longer than the TTL.
                guard.check()

        asyncio.run(work())

    def test_a_loss_is_awaited(self) -> None:
        async def work() -> Loss:
            guard = await self.client.lock(self.name, ttl=TTL).aacquire()
            await asyncio.to_thread(take_away, guard)
            loss = await asyncio.wait_for(guard.wait_lost(), PATIENCE)
            await guard.arelease()
            return loss

        self.assertEqual("gone", asyncio.run(work()).kind)

    def test_who_stops_waiting_leaves_the_queue(self) -> None:
        async def main() -> None:
            async with self.client.lock(self.name):
                with self.assertRaises(asyncio.TimeoutError):
                    await asyncio.wait_for(self.client.lock(self.name, ttl=300, wait=PATIENCE).aacquire(), 0.3)
            # Who had not left the queue would now get the lock, for longer than this wait.
            async with self.client.lock(self.name, wait=60):
                pass

        asyncio.run(main())

    def test_decorated_coroutines_of_one_lock_take_turns(self) -> None:
        inside = 0

        @self.client.locked(self.name, wait=PATIENCE)
        async def work(number: int) -> int:
            nonlocal inside
            inside += 1
            await asyncio.sleep(0.01)
            self.assertEqual((1, self.name), (inside, current_guard().name))
            inside -= 1
            return number

        async def main() -> list[int]:
            return await asyncio.gather(*(work(number) for number in range(10)))

        self.assertEqual(list(range(10)), asyncio.run(main()))


if __name__ == "__main__":
    unittest.main()
