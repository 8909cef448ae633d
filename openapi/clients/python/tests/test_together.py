"""Guards of one client renew together. A proxy in front of a real gateway counts the requests."""

from __future__ import annotations

import json
import threading
import time
import unittest
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
from servers import PATIENCE, Servers

from redlock_gateway import Client, Guard, LockLostError

# A busy machine may not run a process for a second: it would lose a lock of that length, and rightly.
TTL = 3.0
servers: Servers


def setUpModule() -> None:
    global servers
    servers = Servers()


def tearDownModule() -> None:
    servers.close()


class Proxy(ThreadingHTTPServer):
    """Passes everything on, and counts the renewals."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, status: int = 0) -> None:
        """``status`` is the proxy's own answer to PATCH /locks, unless it is 0."""
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = status
        self.joint = self.single = 0
        self.mutex = threading.Lock()
        # It replaces the first result of the next answer to PATCH /locks.
        self.first: dict[str, object] | None = None
        # While it is clear, the proxy does not answer to PATCH /locks.
        self.answers_many = threading.Event()
        self.answers_many.set()
        threading.Thread(target=self.serve_forever, args=[0.02], daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def counts(self) -> tuple[int, int]:
        with self.mutex:
            return self.joint, self.single

    def close(self) -> None:
        self.answers_many.set()
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        is_joint = (self.command, self.path) == ("PATCH", "/locks")
        with self.server.mutex:
            self.server.joint += is_joint
            self.server.single += self.command == "PATCH" and not is_joint
        if is_joint and self.server.status:
            self._answer(self.server.status, b"", "text/plain")
            return
        if is_joint:
            self.server.answers_many.wait(PATIENCE)
        passed = {"Content-Type", "Lock-Token", "Idempotency-Key"}
        headers = {name: value for name, value in self.headers.items() if name.title() in passed}
        request = urllib.request.Request(
            servers.urls[0] + self.path, data=body or None, headers=headers, method=self.command
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                content = self._replaced(answer.read()) if is_joint else answer.read()
                self._answer(answer.status, content, answer.headers.get("Content-Type", ""))
        except urllib.error.HTTPError as answer:
            with answer:
                self._answer(answer.code, answer.read(), answer.headers.get("Content-Type", ""))

    do_POST = do_PATCH = do_DELETE = do_GET = _pass

    def _replaced(self, content: bytes) -> bytes:
        with self.server.mutex:
            first, self.server.first = self.server.first, None
        if first is None:
            return content
        results = json.loads(content)["results"]
        results[0] = {"name": results[0]["name"], "elapsed_ms": 0, **first}
        return json.dumps({"results": results}).encode()

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        try:
            self.send_response(status)
            if status != 204:
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


class Together(unittest.TestCase):
    def setUp(self) -> None:
        self.name = self.id().rsplit(".", 1)[-1]
        self.opened = ExitStack()
        self.addCleanup(self.opened.close)

    def proxy(self, status: int = 0) -> tuple[Proxy, Client]:
        proxy = Proxy(status)
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
        httpx.delete(f"{servers.urls[1]}/locks/{self.name}%2F7", params={"force": "true"})
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
        self.assertLess(time.monotonic() - begin, TTL / 3)
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
