#!/usr/bin/env python3
"""Real servers for the tests of a client in any language: three masters, two gateways over them, a proxy
that loses answers, and a separate gateway that requires a key.

    tests/clients/servers.py GATEWAY        the path of a built redlock-gateway; needs redis-server

One line of JSON on stdout gives their addresses:

    {"gateways": [URL, URL], "proxy": URL, "keyed": URL, "key": KEY, "viewer": KEY, "admin": KEY}

`proxy` stands in front of the first gateway. `keyed` is the separate gateway. Its API keys are
`key`, which is valid for names that begin with "jobs/"; `viewer`, which may list and inspect all
locks; and `admin`, which may do anything. Then the program reads orders from stdin, one JSON object
in each line. It carries out each order and answers with a line, {} or {"error": TEXT}:

    {"do": "stop-masters", "count": N}      the first N masters stop answering (SIGSTOP)
    {"do": "continue-masters"}
    {"do": "restart-master", "index": I}    kill -9, then a new process without the data
    {"do": "stop-gateway", "index": I}      accepts connections and answers none (SIGSTOP)
    {"do": "continue-gateway", "index": I}
    {"do": "kill-gateway", "index": I}      kill -9
    {"do": "start-gateway", "index": I}     restarts at the same address
    {"do": "swallow", "count": N}           the proxy passes on the next N requests, and closes
                                            the connection instead of answering them
    {"do": "refuse", "status": S}           after those the proxy answers S to every POST; 0 ends this

At the end of stdin all servers end.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

# Ends a test that hangs, and never a test on a slow machine.
PATIENCE = 20 * 60
# The kernel kills all children when this process ends, even if it is killed.
DIES_WITH_US = ["setpriv", "--pdeathsig", "KILL"]


def free_ports(count):
    """Ports that no other program takes before they are used. They are below those of outgoing
    connections, and each process has a block of its own.
    """
    for block in range(2000):
        first = 10_000 + (os.getpid() + block) % 2000 * 10
        with contextlib.ExitStack() as bound:
            try:
                for port in range(first, first + count):
                    bound.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
        return list(range(first, first + count))
    raise RuntimeError("no block of ports is free")


def wait_until(what, is_so, process):
    end = time.monotonic() + PATIENCE
    while not is_so():
        if process.poll() is not None:
            raise RuntimeError(f"{what}: the process ended with {process.returncode}")
        if time.monotonic() > end:
            raise RuntimeError(f"{what}: not within {PATIENCE} s")
        time.sleep(0.02)


def stop(process):
    process.send_signal(signal.SIGSTOP)
    # On a busy machine other threads of the process run on for a moment, so this waits until all
    # have stopped.
    os.waitpid(process.pid, os.WUNTRACED)


def answers(url):
    try:
        return urllib.request.urlopen(url, timeout=1).status == 200
    except OSError:
        return False


def accepts(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return True
    except OSError:
        return False


class Proxy:
    """Passes everything on. Instead of answering each of the next `swallows` requests it closes the connection.
    Then it answers each POST with the status `refuses`, unless that is 0.

    What happens to a request is settled when it arrives: a late answer of an earlier test cannot change it.
    """

    def __init__(self, target):
        self.target = target
        self.swallows = 0
        self.refuses = 0
        self.lock = threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            client, _ = self.listener.accept()
            threading.Thread(target=self.serve, args=[client], daemon=True).start()

    def serve(self, client):
        try:
            gateway = socket.create_connection(("127.0.0.1", self.target))
        except OSError:
            client.close()
            return
        swallowed = threading.Event()
        threading.Thread(target=self.copy, args=[client, gateway, swallowed], daemon=True).start()
        while answer := received(gateway):
            if swallowed.is_set():
                break
            try:
                client.sendall(answer)
            except OSError:
                break
        end(client, gateway)

    def copy(self, client, gateway, swallowed):
        while request := received(client):
            with self.lock:
                # The connection ends with the swallowed answer: what follows is the rest of that request.
                if self.swallows and not swallowed.is_set():
                    self.swallows -= 1
                    swallowed.set()
                status = 0 if swallowed.is_set() else self.refuses
            if status and request.startswith(b"POST "):
                refuse(client, request, status)
                break
            try:
                gateway.sendall(request)
            except OSError:
                break
        end(client, gateway)


def received(source):
    try:
        return source.recv(65536)
    except OSError:
        return b""


def refuse(client, request, status):
    """Answers as a gateway does. Closing before the whole request is read could lose the answer."""
    while not is_whole(request) and (more := received(client)):
        request += more
    problem = {"type": "about:blank", "title": "Refused", "status": status}
    body = json.dumps({**problem, "code": "forbidden", "detail": "refused by the test"})
    head = f"HTTP/1.1 {status} Refused\r\nContent-Type: application/problem+json\r\n"
    head += f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    try:
        client.sendall((head + body).encode())
    except OSError:
        pass


def is_whole(request):
    head, end_of_head, body = request.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    return bool(end_of_head) and len(body) >= (int(length[1]) if length else 0)


def end(*sockets):
    for each in sockets:
        try:
            each.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        each.close()


def foreign_environment():
    """The gateway would take this program's REDLOCK_ variables for its settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith("REDLOCK_")}


class Servers:
    def __init__(self, binary, folder):
        self.binary, self.folder = binary, folder
        *master_ports, first, second, keyed = free_ports(6)
        self.master_ports = master_ports
        self.masters = [self.start_master(port) for port in master_ports]
        nodes = [argument for port in master_ports for argument in ("--node", f"redis://127.0.0.1:{port}")]
        # A busy machine may let a master wait for seconds, and a token become too old meanwhile.
        nodes += ["--node-timeout", "5s", "--clock-skew", "4s"]
        # A gateway decides only once whether all masters are new. So the first gateway starts
        # alone.
        self.arguments = [nodes, nodes]
        self.ports = [first, second]
        self.gateways = [self.start_gateway(index) for index in range(2)]
        self.proxy = Proxy(first)
        keys = os.path.join(folder, "keys.toml")
        usual = "acquire,extend,release,inspect"
        self.key = self.new_key(keys, "test", usual, "jobs/*")
        self.viewer = self.new_key(keys, "viewer", "inspect,list", "*")
        self.admin = self.new_key(keys, "admin", f"{usual},list,metrics,force", "*")
        self.keyed = keyed
        self.run_gateway(keyed, ["--auth-keys", keys])

    def start_master(self, port):
        arguments = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", self.folder]
        process = subprocess.Popen([*DIES_WITH_US, "redis-server", *arguments], stdout=subprocess.DEVNULL)
        wait_until("redis-server", lambda: accepts(port), process)
        return process

    def start_gateway(self, index):
        return self.run_gateway(self.ports[index], [*self.arguments[index], "--bootstrap"])

    def run_gateway(self, port, arguments):
        log = open(os.path.join(self.folder, f"gateway-{port}.log"), "ab")
        command = [*DIES_WITH_US, self.binary, "--listen", f"127.0.0.1:{port}", *arguments]
        process = subprocess.Popen(command, env=foreign_environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            wait_until("redlock-gateway", lambda: answers(f"http://127.0.0.1:{port}/readyz"), process)
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{open(log.name).read()}") from None
        return process

    def new_key(self, path, name, verbs, names):
        """Adds a key to the file of keys, and returns it."""
        command = [self.binary, "key", "new", name, "--verbs", verbs, "--names", names]
        made = subprocess.run(command, env=foreign_environment(), check=True, capture_output=True, text=True)
        key, entry = made.stdout.split("\n\n", 1)
        with open(path, "a", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(entry)
        return key.strip()

    def addresses(self):
        urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        keyed = f"http://127.0.0.1:{self.keyed}"
        known = {"key": self.key, "viewer": self.viewer, "admin": self.admin}
        return {"gateways": urls, "proxy": self.proxy.url, "keyed": keyed, **known}

    def do(self, order):
        what, index = order["do"], order.get("index", 0)
        if what == "stop-masters":
            for master in self.masters[: order["count"]]:
                stop(master)
        elif what == "continue-masters":
            for master in self.masters:
                master.send_signal(signal.SIGCONT)
        elif what == "restart-master":
            self.masters[index].kill()
            self.masters[index].wait()
            self.masters[index] = self.start_master(self.master_ports[index])
        elif what == "stop-gateway":
            stop(self.gateways[index])
        elif what == "continue-gateway":
            self.gateways[index].send_signal(signal.SIGCONT)
        elif what == "kill-gateway":
            self.gateways[index].kill()
            self.gateways[index].wait()
        elif what == "start-gateway":
            self.gateways[index] = self.start_gateway(index)
        elif what == "swallow":
            with self.proxy.lock:
                self.proxy.swallows = order["count"]
        elif what == "refuse":
            self.proxy.refuses = order["status"]
        else:
            raise ValueError(f"there is no {what!r}")


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = tempfile.mkdtemp(prefix="redlock-clients-")
    try:
        servers = Servers(os.path.abspath(sys.argv[1]), folder)
        print(json.dumps(servers.addresses()), flush=True)
        for line in sys.stdin:
            try:
                servers.do(json.loads(line))
                answer = {}
            except (KeyError, ValueError, IndexError, RuntimeError) as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
