// The scenarios that every guard runs, over real gateways and masters.

import assert from "node:assert/strict";
import { Console } from "node:console";
import { PassThrough } from "node:stream";
import { after, before, test } from "node:test";
import { setImmediate as turnOfTheLoop } from "node:timers/promises";
import { format, inspect } from "node:util";

import { Client, type Guard, LockHeldError, LockLostError, now, RefusedError, SetupError } from "redlock-gateway";

import { eventually, extended, PATIENCE, type Servers, start, TTL } from "./servers.js";

const inTime = { timeout: 2 * PATIENCE };

let servers: Servers;
let client: Client;
before(async () => {
  servers = await start();
  client = new Client({ url: servers.places.gateways });
});
after(() => servers.end());

/** What somebody else does who knows no guard. */
async function http(method: string, name: string, { token, body }: { token?: string; body?: object } = {}) {
  const response = await fetch(`${servers.places.gateways[0]}/locks/${encodeURIComponent(name)}`, {
    method,
    headers: { "content-type": "application/json", ...(token !== undefined && { "lock-token": token }) },
    ...(body !== undefined && { body: JSON.stringify(body) }),
  });
  return { status: response.status, body: await response.text() };
}

async function takeAway(guard: Guard): Promise<void> {
  // On a busy machine the masters may not answer in time (503): asked again, the lock may be gone already (404).
  let status = 503;
  await eventually("an answer", async () => {
    ({ status } = await http("DELETE", guard.name, { token: guard.token }));
    return status !== 503;
  });
  assert.ok([204, 404].includes(status), `${status}`);
}

test("a guard holds its lock for five times its ttl and leaves nothing", inTime, async () => {
  const guard = await client.lock("reports/nightly", { ttlMs: TTL, owner: "host-7", metadata: { job: "7" } });
  for (const begin = guard.deadline; guard.deadline - begin < 5 * TTL; await extended(guard, 1)) {
    guard.check();
    const { state, owner, fencing_token } = await client.status("reports/nightly");
    assert.deepEqual(
      { state, owner, fencing_token },
      { state: "held", owner: "host-7", fencing_token: guard.fencingToken },
    );
  }
  await guard.release();
  await guard.release();
  assert.equal((await client.status("reports/nightly")).state, "free");
  assert.equal(guard.signal.aborted, false);
  assert.throws(() => guard.check(), SetupError);
});

test("a guard and its client show no secret", inTime, async () => {
  await using guard = await client.lock("secret");
  const owner = new Client({ url: servers.places.gateways, key: "rlk_secret" });
  const said = new PassThrough();
  new Console(said).log(guard, owner, { guard, owner }, "%o %O %j", guard, guard, guard);
  const shown = [guard, owner].flatMap((each) => [
    inspect(each, { depth: 9, showHidden: true }),
    format("%s %o %O %j", each, each, each, each),
    JSON.stringify(each),
    String(each),
  ]);
  for (const text of [...shown, String(said.read())]) {
    assert.ok(!text.includes(guard.token) && !text.includes("rlk_secret"), text);
  }
});

test("await using releases, and whoever is refused is told who holds the lock", inTime, async () => {
  {
    await using guard = await client.lock("using", { owner: "alice" });
    guard.check();
    await assert.rejects(client.lock("using"), (error) => {
      assert.ok(error instanceof LockHeldError);
      assert.deepEqual([error.holder, error.code, error.status], ["alice", "lock_held", 409]);
      assert.ok(
        error.expiresInMs !== undefined &&
          error.retryAfterMs !== undefined &&
          /^lock "using": .*"alice"/.test(error.message),
      );
      return true;
    });
  }
  assert.equal((await client.status("using")).state, "free");
});

test("a lock that is taken away is told lost at the next extension, and its release is quiet", inTime, async () => {
  const guard = await client.lock("taken", { ttlMs: TTL });
  await takeAway(guard);
  const loss = await guard.lost;
  assert.ok(loss instanceof LockLostError);
  assert.deepEqual([loss.kind, loss.lock, guard.signal.reason, guard.loss], ["gone", "taken", loss, loss]);
  assert.throws(() => guard.check(), loss);
  assert.equal(await guard.extended(), false);
  await guard.release();
});

test("a lock that another one has by now is told lost with its holder", inTime, async () => {
  const guard = await client.lock("robbed", { ttlMs: TTL });
  // The thief waits at the gateway of the release, so the lock is never free in between.
  const there = new Client(servers.places.gateways[0]);
  const waiting = there.lock("robbed", { owner: "mallory", waitMs: PATIENCE });
  await eventually("the thief waits", async () => (await there.status("robbed")).waiters_total === 1);
  await takeAway(guard);
  await using thief = await waiting;
  const loss = await guard.lost;
  assert.deepEqual([loss.kind, loss.holder], ["taken", "mallory"]);
  await guard.release();
  thief.check();
});

test("work that ended after the loss is reported lost though it did not look", inTime, async () => {
  const withLock = client.withLock("blind", { ttlMs: TTL }, async (_, guard) => {
    await takeAway(guard);
    await guard.lost;
    return "done";
  });
  await assert.rejects(withLock, { name: "LockLostError", kind: "gone" });
  const using = async (): Promise<string> => {
    await using guard = await client.lock("blind", { ttlMs: TTL });
    await takeAway(guard);
    await guard.lost;
    return "done";
  };
  await assert.rejects(using(), { name: "LockLostError", kind: "gone" });
});

test("work that the signal stopped is reported lost, with its own error as the cause", inTime, async () => {
  const withLock = client.withLock("looking", { ttlMs: TTL }, async (signal, guard) => {
    await takeAway(guard);
    await new Promise((_, reject) => signal.addEventListener("abort", () => reject(new Error("stopped"))));
  });
  await assert.rejects(withLock, (error) => {
    assert.ok(error instanceof LockLostError && error.cause instanceof Error);
    return error.cause.message === "stopped";
  });
  const using = async (): Promise<void> => {
    await using guard = await client.lock("looking", { ttlMs: TTL });
    await takeAway(guard);
    await guard.lost;
    throw new Error("stopped");
  };
  await assert.rejects(using(), (error) => LockLostError.in(error)?.kind === "gone");
});

test("work that failed while it held the lock fails with its own error, and the lock is free", inTime, async () => {
  const failing = client.withLock("failing", () => Promise.reject(new RangeError("by itself")));
  await assert.rejects(failing, RangeError);
  assert.equal((await client.status("failing")).state, "free");
  assert.equal(await client.withLock("failing", () => 7), 7);
});

test("work that let nothing run until after the deadline is reported lost", inTime, async () => {
  const ttlMs = 2_000;
  const withLock = client.withLock("blocking", { ttlMs }, () => {
    Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, ttlMs + 100);
  });
  await assert.rejects(withLock, { name: "LockLostError", kind: "unconfirmed" });
});

test("a night that the machine slept through counts as time that has passed", inTime, async (context) => {
  await using guard = await client.lock("asleep", { ttlMs: 60_000 });
  const real = Date.now;
  context.mock.method(Date, "now", () => real() + 8 * 3_600_000);
  const loss = await guard.lost;
  assert.equal(loss.kind, "unconfirmed");
  assert.throws(() => guard.check(), loss);
});

test("a guard survives the kill of one gateway of two", inTime, async () => {
  await using guard = await client.lock("killed", { ttlMs: TTL });
  await servers.order({ do: "kill-gateway", index: 0 });
  try {
    await extended(guard, 3);
    await using other = await client.lock("killed-2");
    other.check();
    guard.check();
  } finally {
    await servers.order({ do: "start-gateway", index: 0 });
  }
});

test("a guard survives a hung gateway, whichever it is", inTime, async () => {
  for (const index of [0, 1] as const) {
    const { gateways } = servers.places;
    const first = new Client({ url: [gateways[index], gateways[1 - index]!] });
    await using guard = await first.lock(`hung-${index}`, { ttlMs: TTL });
    await servers.order({ do: "stop-gateway", index });
    try {
      await extended(guard, 3);
      guard.check();
    } finally {
      await servers.order({ do: "continue-gateway", index });
    }
  }
});

test("answers that were swallowed lead to the same grant", inTime, async () => {
  const behind = new Client(servers.places.proxy);
  await servers.order({ do: "swallow", count: 2 });
  const guard = await behind.lock("swallowed", { ttlMs: TTL });
  const { state, fencing_token } = await client.status("swallowed");
  assert.deepEqual([state, fencing_token], ["held", guard.fencingToken]);
  await servers.order({ do: "swallow", count: 1 });
  await extended(guard, 1);
  await servers.order({ do: "swallow", count: 1 });
  await guard.release();
  assert.equal((await client.status("swallowed")).state, "free");
});

test("twenty contenders never overlap on a counter without a lock", inTime, async () => {
  const EACH = 5;
  let counter = 0;
  let inside = 0;
  const contend = async (_: unknown, n: number): Promise<void> => {
    const own = new Client(servers.places.gateways[n % 2]!);
    for (let time = 0; time < EACH; time++) {
      await own.withLock("counter", { waitMs: 2 * PATIENCE }, async () => {
        assert.equal(++inside, 1);
        const before = counter;
        await turnOfTheLoop();
        counter = before + 1;
        inside--;
      });
    }
  };
  await Promise.all(Array.from({ length: 20 }, contend));
  assert.equal(counter, 20 * EACH);
});

test("a wait in turns gets the lock when its holder has died", inTime, async () => {
  const patient = new Client({ url: servers.places.gateways, maxTurnMs: 200 });
  let granted = "";
  await eventually("a grant", async () => {
    const { status, body } = await http("POST", "turns", { body: { ttl_ms: 5_000 } });
    granted = body;
    return status === 201;
  });
  const first = JSON.parse(granted);
  await assert.rejects(patient.lock("turns", { waitMs: 100 }), LockHeldError);
  const begin = now();
  await using guard = await patient.lock("turns", { waitMs: PATIENCE });
  assert.ok(guard.fencingToken > first.fencing_token);
  assert.ok(now() - begin > 400, `${now() - begin} ms are not several turns`);
});

test("a wait that is given up ends with the reason of its signal, and leaves nothing", inTime, async () => {
  const holder = await client.lock("left", { ttlMs: TTL });
  const reason = new Error("enough");
  const controller = new AbortController();
  const waiting = client.lock("left", { waitMs: Infinity, signal: controller.signal });
  await extended(holder, 1);
  controller.abort(reason);
  await assert.rejects(waiting, reason);
  await holder.release();
  await eventually("nobody holds it", async () => (await client.status("left")).state === "free");
});

test("what the gateway refuses is told with what is allowed", inTime, async () => {
  const { keyed: url, key } = servers.places;
  const known = new Client({ url, key });
  const refusals: [() => Promise<Guard>, string, number, RegExp][] = [
    [() => new Client({ url, key: "rlk_nonsense" }).lock("jobs/a"), "unauthenticated", 401, /key/],
    [() => new Client(url).lock("jobs/a"), "unauthenticated", 401, /key/],
    [() => known.lock("other/a"), "forbidden", 403, /acquire/],
    [() => known.lock("jobs/ä"), "invalid_name", 400, /A-Za-z0-9/],
    [() => known.lock("jobs/a", { ttlMs: 3_600_000 }), "invalid_ttl", 400, /300000/],
    [() => known.lock("jobs/a", { ttlMs: 1 }), "invalid_ttl", 400, /10 /],
  ];
  for (const [refused, code, status, allowed] of refusals) {
    await assert.rejects(refused(), (error) => {
      assert.ok(error instanceof RefusedError && !(error instanceof LockHeldError), String(error));
      assert.deepEqual([error.code, error.status], [code, status]);
      assert.match(error.message, allowed);
      return true;
    });
  }
  await using guard = await known.lock("jobs/a");
  guard.check();
});

test("with two of three masters stopped the loss is told before the deadline", inTime, async () => {
  // A busy machine may tell the test late, so the margin is long.
  await using guard = await client.lock("masterless", { ttlMs: 2 * TTL, marginMs: 2_500 });
  await extended(guard, 1);
  await servers.order({ do: "stop-masters", count: 2 });
  try {
    const loss = await guard.lost;
    const left = guard.remainingMs;
    assert.equal(loss.kind, "unconfirmed");
    assert.match(loss.message, /outcome_unknown|quorum|did not answer/);
    assert.ok(left > 100, `${left} ms before the deadline; the margin is 2,500 ms`);
    assert.throws(() => guard.check(), loss);
  } finally {
    await servers.order({ do: "continue-masters" });
  }
});

test("a warn that throws leaves the loss told and no rejection unhandled", inTime, async () => {
  const rejected: unknown[] = [];
  const hear = (reason: unknown): unknown => rejected.push(reason);
  process.on("unhandledRejection", hear);
  const thrower = (): never => {
    throw new Error("the log is gone");
  };
  for (const warn of [thrower, async () => thrower()]) {
    const guard = await new Client({ url: servers.places.gateways, warn }).lock("warned", { ttlMs: TTL });
    await takeAway(guard);
    await guard.lost;
    await guard.release();
  }
  await turnOfTheLoop();
  await turnOfTheLoop();
  process.off("unhandledRejection", hear);
  assert.deepEqual(rejected, []);
});
