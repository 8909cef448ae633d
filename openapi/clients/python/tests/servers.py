"""Real gateways and masters, as tests/clients/servers.py starts them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# How long a test waits for an event: as long as all tests may take. It ends a test that hangs, and
# never a test on a slow machine.
PATIENCE = 20 * 60.0
_SCRIPT = Path(__file__).resolve().parents[4] / "tests" / "clients" / "servers.py"


class Servers:
    def __init__(self) -> None:
        gateway = os.environ.get("REDLOCK_GATEWAY")
        if not gateway:
            raise RuntimeError("REDLOCK_GATEWAY has to say where a built redlock-gateway is")
        self._process = subprocess.Popen(
            [sys.executable, "-B", str(_SCRIPT), gateway], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        where = self._answer()
        self.urls: list[str] = where["gateways"]
        self.proxy: str = where["proxy"]
        self.keyed: str = where["keyed"]
        self.key: str = where["key"]

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the servers have ended")
        return json.loads(line)

    def do(self, what: str, **more: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **more}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        if answer:
            raise RuntimeError(f"{what}: {answer}")

    @contextlib.contextmanager
    def during(self, what: str, afterwards: str, **more: int) -> Iterator[None]:
        self.do(what, **more)
        try:
            yield
        finally:
            more.pop("count", None)
            self.do(afterwards, **more)
            for url in self.urls:
                _ready(url)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE)
        self._process.stdout.close()


def _ready(url: str) -> None:
    end = time.monotonic() + PATIENCE
    while True:
        try:
            urllib.request.urlopen(f"{url}/readyz", timeout=1).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
