"""A steady load of requests to gateways, with counts for each period. Used by `tests/deploy/compose` and
`tests/deploy/kubernetes`.

Three kinds of clients run at the same time:
  workers      acquire a lock of their own at one gateway, extend it at the next, and release it there (a
               Service counts as one gateway)
  a keeper     extends locks that are held for as long as the load runs, at the gateways in turn
  a rival      tries to acquire the locks of the keeper, which must be refused

A failed request is counted and not repeated. A lock counts as lost if a gateway says so before it was
released, or if no extension succeeded before its deadline. It counts as granted twice if the rival gets it.
"""

import http.client
import json
import threading
import time
from collections import Counter
from contextlib import contextmanager

from report import ok

WORKERS, HELD = 4, 10
# Seconds. The keeper extends each held lock once in 2 s.
PACE, KEEPER_PACE, RIVAL_PACE, TIME_OUT = 0.05, 0.2, 0.2, 3
WORKER_TTL_MS, HELD_TTL_MS = 10_000, 60_000
# Bounds while a majority of the masters is there: seconds without any success, and the share of
# requests that may be refused. All masters share one disk here. While it stalls, votes come too late.
LONGEST_GAP = 5.0
SHARE_REFUSED = 0.25
# A period is disturbed if a thread that only sleeps was late by as many seconds. Then the machine did
# not run its processes, and the bounds are not judged.
DISTURBED = 0.5
# How long the clients may take to end, in seconds. Ends a test that hangs, and never a test on a slow machine.
PATIENCE = 20 * 60
REFUSALS = {"503 quorum_unavailable", "503 outcome_unknown"}


class Client:
    """A kept connection to one gateway, with an API key."""

    def __init__(self, port, context, key, host="localhost"):
        self.host, self.port, self.context, self.key = host, port, context, key
        self.connection = None

    def call(self, method, path, body=None, token=None, limit=TIME_OUT):
        """Sends one request. Returns (status, body). Raises OSError or HTTPException if no answer comes."""
        if self.connection is None:
            self.connection = http.client.HTTPSConnection(self.host, self.port, timeout=limit, context=self.context)
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        headers.update({"Lock-Token": token} if token else {})
        headers.update({"Content-Type": "application/json"} if body is not None else {})
        try:
            self.connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = self.connection.getresponse()
            content = answer.read().decode()
        except (OSError, http.client.HTTPException):
            self.close()
            raise
        if answer.will_close:
            self.close()
        return answer.status, json.loads(content) if content.startswith("{") else content

    def close(self):
        if self.connection:
            self.connection.close()
        self.connection = None


class Held:
    """A lock of the keeper. The deadline is until when its holder may trust it."""

    def __init__(self, name):
        self.name, self.token, self.deadline = name, None, 0

    def granted(self, body, sent):
        self.token = body.get("token", self.token)
        # The validity begins when the gateway answers. Here it begins when the request was sent, which is earlier. So
        # this deadline may be too early, but never too late.
        self.deadline = sent + body["validity_ms"] / 1000


class Load:
    def __init__(self, client_of, gateways):
        """`client_of(gateway)` makes a Client. Each thread gets its own."""
        self.client_of, self.gateways = client_of, gateways
        self.held = [Held(f"held/{number}") for number in range(HELD)]
        self.records, self.lost, self.twice, self.rows = [], [], [], []
        self.stopped, self.crashed = threading.Event(), []
        self.threads = []
        # How late the thread that only sleeps was: (moment, seconds).
        self.late = []

    # ---- one request ----

    def ask(self, clients, gateway, method, path, wanted, body=None, token=None):
        """Sends one request and counts it. Returns (status, body, time of sending); the status is 0 if no answer came."""
        sent = time.monotonic()
        try:
            status, answer = clients[gateway].call(method, path, body, token)
            code = answer.get("code", "") if isinstance(answer, dict) else ""
            kind = "" if (status, code) in wanted or (status, "") in wanted and not code else f"{status} {code}".strip()
        except TimeoutError:
            status, answer, kind = 0, {}, "time-out"
        except ConnectionRefusedError:
            status, answer, kind = 0, {}, "refused"
        except (OSError, http.client.HTTPException):
            status, answer, kind = 0, {}, "disconnected"
        self.records.append((time.monotonic(), gateway, kind))
        return status, answer, sent

    def is_lost(self, name, status, answer):
        if status in (404, 409) and answer.get("code") in ("lock_not_found", "not_holder"):
            self.lost.append(f"{name}: {status} {answer['code']}")
            return True
        return False

    # ---- clients ----

    def work(self, number):
        clients = self.clients()
        turn = 0
        while not self.stopped.wait(PACE):
            turn += 1
            first, second = (self.gateways[(number + turn + at) % len(self.gateways)] for at in (0, 1))
            path = f"/locks/load/{number}/{turn}"
            status, answer, sent = self.ask(clients, first, "POST", path, {(201, "")}, {"ttl_ms": WORKER_TTL_MS})
            if status != 201:
                continue
            lock = Held(path)
            lock.granted(answer, sent)
            status, answer, sent = self.ask(clients, second, "PATCH", path, {(200, "")}, {"ttl_ms": WORKER_TTL_MS}, lock.token)
            if sent < lock.deadline and self.is_lost(path, status, answer):
                continue
            self.ask(clients, first, "DELETE", path, {(204, "")}, token=lock.token)

    def keep(self):
        clients = self.clients()
        turn = 0
        while not self.stopped.wait(KEEPER_PACE):
            # Each lock is extended at the gateways in turn.
            lock, round_ = self.held[turn % HELD], turn // HELD
            gateway = self.gateways[(turn + round_) % len(self.gateways)]
            turn += 1
            self.extend(clients, gateway, lock)

    def extend(self, clients, gateway, lock):
        """Extends a lock of the keeper. Returns whether that succeeded."""
        path = f"/locks/{lock.name}"
        status, answer, sent = self.ask(clients, gateway, "PATCH", path, {(200, "")}, {"ttl_ms": HELD_TTL_MS}, lock.token)
        if status == 200:
            lock.granted(answer, sent)
        elif not self.is_lost(lock.name, status, answer) and time.monotonic() > lock.deadline:
            self.lost.append(f"{lock.name}: not extended before its deadline")
        return status == 200

    def compete(self):
        clients = self.clients()
        turn = 0
        while not self.stopped.wait(RIVAL_PACE):
            turn += 1
            name, gateway = self.held[turn * 3 % HELD].name, self.gateways[turn % len(self.gateways)]
            status, _, _ = self.ask(clients, gateway, "POST", f"/locks/{name}", {(409, "lock_held")}, {"ttl_ms": WORKER_TTL_MS})
            if status == 201:
                self.twice.append(name)

    def sleep(self):
        """Measures how late this process runs, as a control."""
        before = time.monotonic()
        while not self.stopped.wait(PACE):
            now = time.monotonic()
            self.late.append((now, now - before - PACE))
            before = now

    # ---- the whole load ----

    def clients(self):
        return {gateway: self.client_of(gateway) for gateway in self.gateways}

    def acquire_held(self):
        clients = self.clients()
        for lock in self.held:
            status = 503
            # On a busy machine the masters may answer too late.
            while status in (0, 503):
                status, answer, sent = self.ask(clients, self.gateways[0], "POST", f"/locks/{lock.name}", {(201, "")}, {"ttl_ms": HELD_TTL_MS})
            assert status == 201, f"{lock.name} cannot be acquired: {status} {answer}"
            lock.granted(answer, sent)

    def extend_held(self, gateway):
        """Extends each held lock once at a gateway. All of them must succeed before their deadlines."""
        clients = {gateway: self.client_of(gateway)}
        refused = self.held
        while refused and not self.lost:
            refused = [lock for lock in refused if not self.extend(clients, gateway, lock)]
        assert not refused, f"{gateway} does not extend {[lock.name for lock in refused]}; lost: {self.lost}"

    def start(self):
        jobs = [(self.sleep, ()), (self.keep, ()), (self.compete, ()), *[(self.work, (number,)) for number in range(WORKERS)]]
        self.threads = [threading.Thread(target=self.guarded, args=job, daemon=True) for job in jobs]
        for thread in self.threads:
            thread.start()

    def guarded(self, function, arguments):
        try:
            function(*arguments)
        except Exception as error:  # An error in a thread must fail the test.
            self.crashed.append(f"{function.__name__}: {type(error).__name__}: {error}")

    def stop(self):
        self.stopped.set()
        for thread in self.threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a client of the load does not end"
        self.threads = []

    # The load is one of the things that `containers.until` watches.
    name = "the load"

    def alive(self):
        assert not self.crashed, f"a client of the load failed: {self.crashed}"
        assert not self.lost and not self.twice, f"locks lost: {self.lost}; granted twice: {self.twice}"

    def output_text(self):
        latest = Counter(f"{gateway}: {kind or 'ok'}" for _, gateway, kind in self.records[-300:])
        return "the last 300 requests: " + ", ".join(f"{number} × {what}" for what, number in sorted(latest.items()))

    def succeeded(self, since, gateway=None):
        """How many requests have succeeded since a time."""
        return sum(1 for at, at_gateway, kind in reversed(self.records[:]) if at > since and not kind and gateway in (None, at_gateway))

    def failed(self, since, kind):
        return [gateway for at, gateway, failed in self.records[:] if at > since and failed == kind]

    # ---- counts ----

    @contextmanager
    def period(self, title):
        """Counts the requests that are answered in this period, as a row of the table."""
        began, lost, twice = time.monotonic(), len(self.lost), len(self.twice)
        yield began
        ended = time.monotonic()
        self.alive()
        within = [record for record in self.records[:] if began <= record[0] < ended]
        good = [began, *sorted(at for at, _, kind in within if not kind), ended]
        kinds = Counter((gateway, kind) for _, gateway, kind in within if kind)
        self.rows.append({
            "title": title, "seconds": ended - began, "requests": len(within), "failed": sum(kinds.values()), "kinds": kinds,
            "gap": max(later - earlier for earlier, later in zip(good, good[1:])),
            "late": max((late for at, late in self.late[:] if began <= at < ended), default=0),
            "lost": len(self.lost) - lost, "twice": len(self.twice) - twice,
        })

    def check_majority(self, cut_off=(), permitted=REFUSALS):
        """Demands of the last period what a majority of masters promises. Requests to gateways that are cut off may fail."""
        row = self.rows[-1]
        if row["late"] >= DISTURBED:
            ok(f"{row['title']}: no lock lost; bounds NOT JUDGED, because the machine ran this process {row['late']:.1f} s late")
            return
        others = {(gateway, kind): number for (gateway, kind), number in row["kinds"].items() if gateway not in cut_off}
        assert {kind for _, kind in others} <= permitted, f"{row['title']}: requests failed: {others}\n{self.table()}"
        bound = max(2, SHARE_REFUSED * row["requests"])
        assert sum(others.values()) <= bound, f"{row['title']}: more than {bound:.0f} requests failed: {others}\n{self.table()}"
        assert row["gap"] < LONGEST_GAP, f"{row['title']}: no request succeeded for {row['gap']:.1f} s\n{self.table()}"
        ok(f"{row['title']}: {row['requests']} requests, {row['failed']} failed, longest gap {row['gap'] * 1000:.0f} ms, no lock lost")

    def table(self):
        titles = ["fault", "seconds", "requests", "failed", "longest gap", "locks lost", "granted twice", "failures by kind"]
        lines = [titles]
        for row in self.rows:
            kinds = ", ".join(f"{number} × {kind} at {gateway}" for (gateway, kind), number in sorted(row["kinds"].items())) or "none"
            numbers = [f"{row['seconds']:.1f}", row["requests"], row["failed"], f"{row['gap'] * 1000:.0f} ms", row["lost"], row["twice"]]
            lines.append([row["title"], *map(str, numbers), kinds])
        widths = [max(len(line[at]) for line in lines) for at in range(len(titles))]
        return "\n".join("  ".join(cell.ljust(width) if at in (0, len(titles) - 1) else cell.rjust(width)
                                   for at, (cell, width) in enumerate(zip(line, widths))).rstrip() for line in lines)
