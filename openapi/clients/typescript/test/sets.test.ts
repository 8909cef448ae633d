// Sets of locks, over real gateways and masters.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import createClient from "openapi-fetch";
import {
  Client,
  type Guard,
  LockHeldError,
  LockLostError,
  type paths,
  RefusedError,
  SetupError,
} from "redlock-gateway";

import { proxied } from "./proxied.js";
import { eventually, extended, PATIENCE, type Servers, start, TTL } from "./servers.js";

const inTime = { timeout: 2 * PATIENCE };

let servers: Servers;
let client: Client;
before(async () => {
  servers = await start();
  client = new Client({ url: servers.places.gateways });
});
after(() => servers.end());

const pair = (prefix: string): [string, string] => [`${prefix}/staging`, `${prefix}/production`];

async function allFree(names: readonly string[]): Promise<boolean> {
  const all = await Promise.all(names.map((name) => client.status(name)));
  return all.every(({ state }) => state === "free");
}

test("a set excludes each of its locks, and the reverse", inTime, async () => {
  const names = pair("excludes");
  const guard = await client.locks(names, { owner: "deploy" });
  assert.deepEqual([guard.names, guard.name], [names, names.join(", ")]);
  for (const name of names) {
    await assert.rejects(client.lock(name), (error) => error instanceof LockHeldError && error.holder === "deploy");
    assert.equal((await client.status(name)).fencing_token, guard.fencingToken);
  }
  await guard.release();
  assert.ok(await allFree(names));

  const single = await client.lock(names[1], { owner: "alone" });
  await assert.rejects(client.locks(names), (error) => {
    assert.ok(error instanceof LockHeldError);
    assert.deepEqual(
      error.held?.map(({ name, holder }) => [name, holder]),
      [[names[1], "alone"]],
    );
    return true;
  });
  assert.ok(await allFree([names[0]]));
  let waits!: Promise<Guard>;
  await new Promise<void>((resolve) => {
    waits = client.locks(names, { waitMs: PATIENCE, onWaiting: () => resolve() });
  });
  await single.release();
  await (await waits).release();
});

test("a set is held for five times its ttl, by joint requests", inTime, async () => {
  await using proxy = await proxied(servers);
  const names = pair("held");
  await using guard = await new Client(proxy.url).locks(names, { ttlMs: TTL });
  for (const begin = guard.deadline; guard.deadline - begin < 5 * TTL; await extended(guard, 1)) {
    for (const name of names) {
      assert.equal((await client.status(name)).fencing_token, guard.fencingToken);
    }
  }
  assert.deepEqual([guard.waiters, proxy.single], [0, 0]);
});

test("a set is lost with any of its locks", inTime, async () => {
  const names = pair("lost");
  for (const taken of names) {
    const work = async (signal: AbortSignal, guard: Guard): Promise<void> => {
      await client.forceRelease(taken);
      await guard.lost;
      assert.ok(signal.aborted);
    };
    await assert.rejects(client.withLocks(names, { ttlMs: TTL }, work), (error) => {
      assert.ok(error instanceof LockLostError);
      assert.deepEqual([error.kind, error.lock], ["gone", taken]);
      return true;
    });
    await eventually("the other lock is free", () => allFree(names));
  }
});

test("the deadline of a set moves when all its locks are extended", inTime, async () => {
  await using proxy = await proxied(servers);
  const guard = await new Client(proxy.url).locks(pair("deadline"), { ttlMs: TTL });
  for (const status of [503, 403]) {
    proxy.first = { status, code: "c", detail: "ask again" };
    await eventually("a failed extension", async () => proxy.first === undefined);
    await extended(guard, 1);
  }
  // From here on, one of the two locks is never extended.
  await eventually("the loss", async () => {
    proxy.first = { status: 503, code: "c", detail: "ask again" };
    return guard.loss !== undefined;
  });
  const loss = await guard.lost;
  assert.deepEqual([loss.kind, loss.lock], ["unconfirmed", guard.name]);
  // On a busy machine, the last try has no time left.
  assert.match(loss.detail, /deadline\/staging": c \(503\)|did not answer within 0\.1 s/);
  await guard.release();
});

test("a set is released, also when nobody answered", inTime, async () => {
  const names = pair("released");
  const swallowing = new Client(servers.places.proxy);
  await servers.order({ do: "swallow", count: 1 });
  const guard = await swallowing.locks(names);
  await servers.order({ do: "swallow", count: 1 });
  await guard.release();
  assert.ok(await allFree(names));
  await servers.order({ do: "swallow", count: 1 });
  await servers.order({ do: "refuse", status: 403 });
  await assert.rejects(swallowing.locks(names, { ttlMs: 60_000 }), RefusedError);
  await servers.order({ do: "refuse", status: 0 });
  await eventually("all locks are free", () => allFree(names));
});

test("a set refuses what only a single lock has", inTime, async () => {
  for (const option of [{ queue: "all" }, { slots: 2 }, { take: 1 }]) {
    await assert.rejects(client.locks(pair("options"), option as object), SetupError);
  }
  for (const names of [[], ["a", "a"], ["a", ""]]) {
    await assert.rejects(client.locks(names), RefusedError);
  }
});

test("the generated types describe a request and the claim of its set", inTime, async () => {
  const api = createClient<paths>({ baseUrl: servers.places.gateways[0] });
  const names = pair("deferred");
  const header = { "Idempotency-Key": "typescript-request-1" };
  const created = await api.POST("/requests", { params: { header }, body: { names } });
  assert.deepEqual([created.response.status, created.data?.state, created.data?.names], [202, "ready", names]);
  const claimed = await api.POST("/locks", { params: { header }, body: { names } });
  assert.deepEqual([claimed.response.status, claimed.data?.names], [201, names]);
  const now = await api.GET("/requests/{id}", { params: { path: { id: created.data?.id ?? "" } } });
  assert.equal(now.data?.state, "claimed");
});
