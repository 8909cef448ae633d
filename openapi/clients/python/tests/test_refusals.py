"""Acquires that end with a refusal, and logs that nobody reads, over a small server that follows a script."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
import unittest
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from servers import PATIENCE

import redlock_gateway
from redlock_gateway import Client, LockHeldError, RefusedError, UnavailableError

# The answers of a gateway by status. 0 closes the connection without an answer, 502 is a proxy's page.
CODES = {
    400: "invalid_body",
    401: "unauthenticated",
    403: "forbidden",
    404: "lock_not_found",
    409: "lock_held",
    413: "body_too_large",
    422: "new",
    429: "rate_limited",
}
LEASE = {
    "name": "a",
    "token": "1.1",
    "fencing_token": 1,
    "ttl_ms": 900,
    "validity_ms": 30000,
    "elapsed_ms": 0,
    "expires_at": "2030-01-01T00:00:00Z",
    "nodes_granted": 1,
    "nodes_total": 1,
    "waiters": 2,
}


Answer = int | tuple[int, dict[str, Any]]


class Scripted:
    """A gateway that answers each method with the next status of its script; the last one repeats. A
    status may come with further fields of the problem.
    """

    def __init__(self, **script: Sequence[Answer]) -> None:
        self.seen: list[tuple[str, str | None]] = []
        self.bodies: list[Any] = []
        seen, bodies, left = self.seen, self.bodies, {method: list(answers) for method, answers in script.items()}

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                bodies.append(json.loads(body or "null"))
                seen.append((self.command, self.headers.get("Idempotency-Key")))
                answers = left[self.command]
                answer = answers.pop(0) if len(answers) > 1 else answers[0]
                status, more = answer if isinstance(answer, tuple) else (answer, {})
                if status == 0:
                    self.close_connection = True
                    return
                problem = {
                    "type": "t",
                    "title": "t",
                    "status": status,
                    "code": CODES.get(status),
                    "detail": "d",
                    **more,
                }
                page = json.dumps(LEASE if status < 300 else problem) if status != 502 else "<html>"
                body = b"" if status == 204 else page.encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                if status != 204:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_PATCH = do_DELETE = answer

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=[0.01], daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def scripted(**script: Sequence[Answer]) -> Iterator[Scripted]:
    server = Scripted(**script)
    try:
        yield server
    finally:
        server.close()


class Refusals(unittest.TestCase):
    def test_refusal_after_a_lost_answer_releases_by_key(self) -> None:
        for unanswered in [0, 502]:
            for status in [400, 401, 403, 409, 413, 422]:
                with (
                    self.subTest(unanswered=unanswered, status=status),
                    scripted(POST=[unanswered, status], DELETE=[204]) as server,
                    Client(server.url) as client,
                ):
                    with self.assertRaises(LockHeldError if status == 409 else RefusedError):
                        client.lock("a").acquire()
                    self.assertEqual(["POST", "POST", "DELETE"], [method for method, _ in server.seen])
                    self.assertEqual(1, len({key for _, key in server.seen}), "the key of the POSTs")

    def test_refusal_of_every_post_releases_nothing(self) -> None:
        for status in [403, 409]:
            with (
                self.subTest(status=status),
                scripted(POST=[429, status], DELETE=[204]) as server,
                Client(server.url) as client,
            ):
                self.assertRaises(RefusedError, client.lock("a").acquire)
                self.assertEqual(["POST", "POST"], [method for method, _ in server.seen])

    def test_unanswered_release_by_key_ends_in_time(self) -> None:
        with scripted(POST=[0, 403], DELETE=[0]) as server, Client(server.url) as client:
            done: list[Exception] = []

            def acquire() -> None:
                try:
                    client.lock("a").acquire()
                except (RefusedError, UnavailableError) as error:
                    done.append(error)

            thread = threading.Thread(target=acquire)
            thread.start()
            # It is 2 s, and a busy machine may add some.
            thread.join(20)
            self.assertFalse(thread.is_alive(), "the release by key takes 2 s at most")
            self.assertIsInstance(done[0], RefusedError, "the refusal is reported")


# The program of a user whose standard error is a full pipe that nobody reads. It reports each step
# on its standard output.
PROGRAM = """
import asyncio, os, sys
from redlock_gateway import Client, LockLostError

kind, url = sys.argv[1:]
client = Client(url)

def work():
    with client.lock("a") as guard:
        pass

async def awork():
    async with client.lock("a") as guard:
        pass

def lose():
    try:
        with client.lock("a", ttl=0.9) as guard:
            guard.on_lost(lambda loss: sys.stdin.read(1) or 1 / 0)  # Its exception is logged.
            guard.lost.wait()
            print("told", flush=True)
    except LockLostError:
        pass

if kind == "with":
    work()
elif kind == "async with":
    asyncio.run(awork())
else:
    lose()
    lose()
print("left", flush=True)
os._exit(0)
"""


# A log that takes a moment for each line.
SLOW_LOG = """
import logging, time

handler = logging.StreamHandler()
handler.addFilter(lambda line: time.sleep(0.3) or True)
logging.getLogger().addHandler(handler)
"""


class UnreadLog(unittest.TestCase):
    def left(self, kind: str, url: str) -> list[str]:
        reads, writes = os.pipe()
        fcntl.fcntl(writes, fcntl.F_SETPIPE_SZ, 4096)
        os.write(writes, b"x" * 4096)
        user = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, kind, url],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=writes,
            text=True,
        )
        try:
            return user.communicate(timeout=PATIENCE)[0].split()
        except subprocess.TimeoutExpired:
            user.kill()
            return user.communicate()[0].split()
        finally:
            os.close(reads)
            os.close(writes)

    def test_unread_stderr_does_not_block_leaving_the_block(self) -> None:
        with scripted(POST=[201], DELETE=[403]) as server:
            for kind in ["with", "async with"]:
                self.assertEqual(["left"], self.left(kind, server.url), kind)

    def test_unread_stderr_does_not_block_the_report_of_a_loss(self) -> None:
        with scripted(POST=[201], PATCH=[404], DELETE=[404]) as server:
            self.assertEqual(["told", "told", "left"], self.left("loss", server.url))

    def test_last_lines_are_written_before_the_process_ends(self) -> None:
        with scripted(POST=[201], DELETE=[403]) as server:
            # A busy machine may need longer than the second that the end of a process waits.
            patience = f"import redlock_gateway._lines\nredlock_gateway._lines._LAST_LINES = {PATIENCE}\n"
            program = patience + SLOW_LOG + PROGRAM.replace("os._exit(0)", "")
            user = subprocess.run(
                [sys.executable, "-c", program, "with", server.url], capture_output=True, text=True, timeout=PATIENCE
            )
        self.assertIn("was not released", user.stderr)


class Messages(unittest.TestCase):
    def test_program_that_logs_at_info_sees_no_line_of_each_request(self) -> None:
        with scripted(POST=[201], DELETE=[204]) as server:
            said = {}
            for level in ["INFO", "DEBUG"]:
                setup = f"import logging, httpx; logging.basicConfig(level=logging.{level})\n"
                own = f"httpx.post({server.url!r} + '/own')\n"
                user = subprocess.run(
                    [sys.executable, "-c", setup + own + PROGRAM.replace("os._exit(0)", ""), "with", server.url],
                    capture_output=True,
                    text=True,
                    timeout=PATIENCE,
                )
                said[level] = [line for line in user.stderr.splitlines() if line.startswith("INFO:httpx")]
        self.assertEqual(1, len(said["INFO"]), "the request of the program itself")
        self.assertGreater(len(said["DEBUG"]), 2, "the requests of the library are details")

    def test_every_message_has_the_name_of_the_lock(self) -> None:
        with scripted(POST=[(409, {"holder": "bob", "detail": '"bob" holds it'}), 403], DELETE=[204]) as server:
            with Client(server.url) as client:
                with self.assertRaises(LockHeldError) as held:
                    client.lock("jobs/a").acquire()
                with self.assertRaises(RefusedError) as refused:
                    client.lock("jobs/a").acquire()
        self.assertEqual("lock 'jobs/a': lock_held (409): \"bob\" holds it", str(held.exception))
        self.assertEqual("lock 'jobs/a': forbidden (403): d", str(refused.exception))
        again = pickle.loads(pickle.dumps(held.exception))
        self.assertEqual(("jobs/a", "bob", str(held.exception)), (again.name, again.holder, str(again)))

    def test_former_names_of_exceptions_still_work(self) -> None:
        self.assertIs(redlock_gateway.LockHeld, LockHeldError)
        self.assertIs(redlock_gateway.Refused, RefusedError)
        self.assertIs(redlock_gateway.Unavailable, UnavailableError)
        self.assertIs(redlock_gateway.LockLost, redlock_gateway.LockLostError)

    def test_default_owner_names_user_host_process_and_program(self) -> None:
        with scripted(POST=[201], DELETE=[204]) as server, Client(server.url) as client:
            for owner in [None, "", "me"]:
                client.lock("a", owner=owner).acquire().release()
            default, none, given = (body for body in server.bodies if body)
        self.assertRegex(default["owner"], rf"^.+@{re.escape(socket.gethostname())}:{os.getpid()} .+$")
        self.assertNotIn("owner", none)
        self.assertEqual("me", given["owner"])


if __name__ == "__main__":
    unittest.main()
