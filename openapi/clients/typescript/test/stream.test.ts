// Locks that a gateway extends while a stream of events is open, over real gateways and masters.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { setFlagsFromString } from "node:v8";
import { runInNewContext } from "node:vm";

import { Client, type Guard, LockHeldError, type LockOptions, RefusedError, SetupError } from "redlock-gateway";

import { streamed } from "./streamed.js";
import { eventually, extended, PATIENCE, type Servers, start, TTL } from "./servers.js";

const STREAM = { ttlMs: TTL, extendBy: "stream" } as const;
const inTime = { timeout: 3 * PATIENCE };

let servers: Servers;
let client: Client;
before(async () => {
  servers = await start();
  client = new Client({ url: servers.places.gateways });
});
after(() => servers.end());

async function isOurs(guard: Guard): Promise<void> {
  guard.check();
  const { state, fencing_token } = await client.status(guard.name);
  assert.deepEqual([state, fencing_token], ["held", guard.fencingToken]);
}

const isFree = async (name: string): Promise<boolean> => (await client.status(name)).state === "free";

test("a stream holds its lock while timers are delayed", inTime, async (context) => {
  await using proxy = await streamed(servers.places.gateways[0]);
  const guard = await new Client(proxy.url).lock("untimed", { ...STREAM, owner: "page" });
  // As in a page that has been in the background for long.
  const real = setTimeout;
  const delayed = (call: () => void, ms: number): NodeJS.Timeout => real(call, Math.max(ms, 60_000)).unref();
  context.mock.method(globalThis, "setTimeout", delayed);
  for (const begin = guard.deadline; guard.deadline - begin < 3 * TTL; await extended(guard, 1)) {
    guard.check();
  }
  context.mock.restoreAll();
  await isOurs(guard);
  assert.equal((await client.status("untimed")).owner, "page");
  assert.deepEqual([proxy.posts, proxy.patches, proxy.open], [[undefined], 0, 1]);
  assert.equal(guard.waiters, 0);
  await guard.release();
});

test("a release ends the stream at once", inTime, async () => {
  await using proxy = await streamed(servers.places.gateways[0]);
  // The gateway would end the stream at its next extension, after 100 s.
  const guard = await new Client(proxy.url).lock("released", { ...STREAM, ttlMs: 300_000 });
  setFlagsFromString("--expose-gc");
  runInNewContext("gc")();
  await guard.release();
  await eventually("the stream ends", async () => proxy.open === 0);
  assert.ok(await isFree("released"));
  assert.equal(guard.signal.aborted, false);
  assert.throws(() => guard.check(), SetupError);
});

test("a stream is resumed at the other gateway", inTime, async () => {
  const { gateways } = servers.places;
  for (const [stopped, continued] of [
    ["kill-gateway", "start-gateway"],
    ["stop-gateway", "continue-gateway"],
  ] as const) {
    await using other = await streamed(gateways[1]);
    const pair = new Client({ url: [gateways[0], other.url] });
    await using guard = await pair.lock(stopped, { ...STREAM, slots: 2, take: 2 });
    assert.deepEqual(guard.slotsHeld, [1, 2]);
    await servers.order({ do: stopped, index: 0 });
    try {
      await eventually("a stream at the other gateway", async () => other.posts.length > 0);
      await extended(guard, 3);
      guard.check();
      assert.deepEqual([...new Set(other.posts)], [guard.token]);
    } finally {
      await servers.order({ do: continued, index: 0 });
    }
  }
});

test("a stream that ended or broke is resumed", inTime, async () => {
  await using first = await streamed(servers.places.gateways[0]);
  await using second = await streamed(servers.places.gateways[1]);
  const guard = await new Client({ url: [first.url, second.url] }).lock("drained", STREAM);
  first.end('event: end\ndata: {"reason":"draining"}\n\n');
  await eventually("a stream at the second gateway", async () => second.posts.length > 0);
  await extended(guard, 2);
  const before = second.posts.length;
  second.end('event: end\ndata: {"reason":"time"}\n\n');
  await eventually("another stream at the second gateway", async () => second.posts.length > before);
  await extended(guard, 2);
  second.end();
  await eventually("a stream at the first gateway", async () => first.posts.length > 1);
  await extended(guard, 2);
  await isOurs(guard);
  const [opened, ...resumed] = first.posts;
  assert.equal(opened, undefined);
  assert.deepEqual([...new Set([...resumed, ...second.posts])], [guard.token]);
  await eventually("one stream is open", async () => first.open + second.open === 1);
  assert.equal(first.patches + second.patches, 0);
  await guard.release();
  assert.ok(await isFree("drained"));
});

test("a stream tells of a loss before the deadline", inTime, async () => {
  for (const url of [servers.places.gateways, servers.places.gateways[0]]) {
    await using guard = await new Client({ url }).lock(`masterless/${[url].flat().length}`, {
      ...STREAM,
      ttlMs: 2 * TTL,
      // A busy machine may tell the test late.
      marginMs: 2_500,
    });
    await extended(guard, 1);
    await servers.order({ do: "stop-masters", count: 2 });
    try {
      const loss = await guard.lost;
      const left = guard.remainingMs;
      assert.equal(loss.kind, "unconfirmed");
      assert.ok(left > 100, `${left} ms before the deadline; the margin is 2,500 ms`);
      assert.throws(() => guard.check(), loss);
    } finally {
      await servers.order({ do: "continue-masters" });
    }
  }
});

test("a stream tells that its lock was taken away", inTime, async () => {
  const guard = await client.lock("taken", STREAM);
  await client.forceRelease("taken");
  const loss = await guard.lost;
  assert.deepEqual([loss.kind, loss.lock, guard.signal.reason], ["gone", "taken", loss]);
  assert.equal(await guard.extended(), false);
  await guard.release();
});

test("a stream waits for its lock", inTime, async () => {
  const held = (error: unknown): boolean => error instanceof LockHeldError && error.holder === "alice";
  const holder = await client.lock("queue", { owner: "alice" });
  for (const waitMs of [0, 1_500]) {
    await assert.rejects(client.lock("queue", { ...STREAM, waitMs }), held);
  }
  let waiting!: Promise<Guard>;
  await new Promise<void>((resolve) => {
    waiting = client.lock("queue", { ...STREAM, waitMs: PATIENCE, onWaiting: () => resolve() });
  });
  await holder.release();
  const guard = await waiting;
  assert.ok(guard.fencingToken > holder.fencingToken);
  await extended(guard, 1);
  await isOurs(guard);

  const controller = new AbortController();
  const given = client.lock("queue", { ...STREAM, waitMs: Infinity, signal: controller.signal });
  await eventually("somebody waits", async () => (await client.status("queue")).waiters_total === 1);
  controller.abort(new RangeError("enough"));
  await assert.rejects(given, RangeError);
  await guard.release();
  await eventually("it is free", () => isFree("queue"));
});

test("a lost answer to a stream leaves one grant at most", inTime, async () => {
  const behind = new Client(servers.places.proxy);
  await servers.order({ do: "swallow", count: 1 });
  await using guard = await behind.lock("swallowed", STREAM);
  await isOurs(guard);

  await servers.order({ do: "swallow", count: 1 });
  await servers.order({ do: "refuse", status: 403 });
  try {
    await assert.rejects(behind.lock("refused", { ...STREAM, ttlMs: 60_000 }), RefusedError);
    await eventually("it is free", () => isFree("refused"));
  } finally {
    await servers.order({ do: "refuse", status: 0 });
  }
});

test("what a stream cannot do is refused", inTime, async () => {
  const options: LockOptions = { extendBy: "stream" };
  const text = 'lock "a, b": there is no option extendBy: it is for a single lock, not for a set';
  await assert.rejects(client.locks(["a", "b"], options), { name: "SetupError", message: text });
  await assert.rejects(client.lock("a", { extendBy: "timer" as never }), SetupError);
  await assert.rejects(client.lock("a", { ...options, ttlMs: 999 }), { name: "RefusedError", code: "invalid_ttl" });
});
