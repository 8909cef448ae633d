"""Starts the readers, lets events and a heartbeat reach them, and compares what each delivered."""

import json
import os
import subprocess
import sys
import threading
import urllib.request

# Ends a test that hangs, and never a test on a slow machine.
PATIENCE = 20 * 60
EXPECTED = ["snapshot", "held", "released"]


def readers(url, work):
    python = [f"{work}/venv/bin/python", "-B", f"{sys.path[0]}/reader.py"]
    yield "httpx-sse", [*python, "httpx-sse", url], {}
    yield "sseclient-py", [*python, "sseclient-py", url], {}
    yield "sseclient", [*python, "sseclient", url], {"PYTHONPATH": f"{work}/other"}
    yield "r3labs/sse", [f"{work}/reader", "r3labs", url], {}
    yield "go-sse", [f"{work}/reader", "go-sse", url], {}
    yield "eventsource", ["node", f"{work}/reader.mjs", url], {}


def call(method, url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, method=method, headers=headers)) as answer:
        return answer.read()


class Reader:
    """A process that writes a line with the kind and the data of each event that its library delivers."""

    def __init__(self, name, command, environment):
        self.name = name
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )
        self.events = []

    def read(self):
        """Returns the next event, or None at the end."""
        line = self.process.stdout.readline()
        if line:
            self.events.append(tuple(json.loads(line)))
        return self.events[-1] if line else None

    def read_to_end(self):
        while self.read():
            pass
        self.process.wait()

    def fault(self):
        kinds = [kind for kind, _ in self.events]
        if kinds != EXPECTED:
            return f"it delivered {self.events}; expected are {EXPECTED}"
        names = [json.loads(data)["name"] for _, data in self.events]
        return "" if names == ["streamed"] * len(EXPECTED) else f"it delivered {self.events}"


def wait_for_heartbeat(url):
    """Returns once a stream that begins now has had a heartbeat."""
    request = urllib.request.Request(url, headers={"accept": "text/event-stream"})
    with urllib.request.urlopen(request) as stream:
        while not (line := stream.readline()).startswith(b":"):
            if not line:
                raise RuntimeError("the stream ended before its first heartbeat")


def main():
    servers_program, gateway, work = sys.argv[1:]
    servers = subprocess.Popen(
        [sys.executable, "-B", servers_program, gateway], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    url = json.loads(servers.stdout.readline())["gateways"][0] + "/locks/streamed"
    reading = [Reader(*parts) for parts in readers(url, work)]
    # A library that never delivers the last event would hold up the test.
    limit = threading.Timer(PATIENCE, lambda: [reader.process.kill() for reader in reading])
    limit.daemon = True
    limit.start()
    for reader in reading:
        reader.read()
    wait_for_heartbeat(url)
    token = json.loads(call("POST", url))["token"]
    call("DELETE", url, **{"lock-token": token})
    rest = [threading.Thread(target=reader.read_to_end) for reader in reading]
    for thread in rest:
        thread.start()
    for thread in rest:
        thread.join()
    servers.stdin.close()
    servers.wait()
    faults = {reader.name: reader.fault() for reader in reading}
    for name, fault in faults.items():
        print(f"clients/streams/check: {name}: {fault or 'ok'}")
    sys.exit(any(faults.values()))


main()
