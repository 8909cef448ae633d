"""A proxy in front of a real gateway that counts the renewals."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from servers import PATIENCE


class Proxy(ThreadingHTTPServer):
    """Passes everything on to a gateway, and counts the renewals."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, gateway: str, status: int = 0) -> None:
        """``status`` is the proxy's own answer to PATCH /locks, unless it is 0."""
        super().__init__(("127.0.0.1", 0), _Handler)
        self.gateway = gateway
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
            self.server.gateway + self.path, data=body or None, headers=headers, method=self.command
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
