// Locks with several holders, over real gateways and masters.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { Client, type Guard, LockHeldError, RefusedError } from "redlock-gateway";

import { eventually, extended, PATIENCE, type Servers, start, TTL } from "./servers.js";

const inTime = { timeout: 2 * PATIENCE };

let servers: Servers;
let client: Client;
before(async () => {
  servers = await start();
  client = new Client({ url: servers.places.gateways });
});
after(() => servers.end());

const isFree = async (name: string): Promise<boolean> => {
  const { state, holders = [] } = await client.status(name);
  return state === "free" && holders.length === 0;
};

test("two of three guards hold two slots", inTime, async () => {
  const pool = { slots: 2, ttlMs: TTL };
  const first = await client.lock("pool", { ...pool, owner: "first" });
  const second = await client.lock("pool", { ...pool, owner: "second" });
  assert.deepEqual([...first.slotsHeld!, ...second.slotsHeld!].sort(), [1, 2]);
  await Promise.all([extended(first, 2), extended(second, 2)]);

  await assert.rejects(client.lock("pool", pool), (error) => {
    assert.ok(error instanceof LockHeldError);
    assert.deepEqual(
      error.holders?.map(({ slot }) => slot),
      [1, 2],
    );
    assert.deepEqual(error.holders.map(({ holder }) => holder).sort(), ["first", "second"]);
    return true;
  });

  let third!: Promise<Guard>;
  await new Promise<void>((resolve) => {
    third = client.lock("pool", { ...pool, waitMs: PATIENCE, onWaiting: () => resolve() });
  });
  await second.release();
  const guard = await third;
  assert.deepEqual(guard.slotsHeld, second.slotsHeld);
  await Promise.all([guard.release(), first.release()]);
});

test("a guard takes two slots or none", inTime, async () => {
  const pool = { slots: 2, ttlMs: TTL };
  const one = await client.lock("both", pool);
  await assert.rejects(client.lock("both", { ...pool, take: 2 }), LockHeldError);
  await one.release();
  const guard = await client.lock("both", { ...pool, take: 2 });
  assert.deepEqual(guard.slotsHeld, [1, 2]);
  await extended(guard, 1);
  await client.forceRelease("both", { slot: 2 });
  assert.equal((await guard.lost).kind, "gone");
  await guard.release();
  assert.ok(await isFree("both"));
  await using single = await client.lock("single");
  assert.equal(single.slotsHeld, undefined);

  for (const options of [{ slots: 0 }, { slots: 257 }, { slots: 2, take: 3 }, { take: 2 }]) {
    const isRefused = (error: unknown): boolean => error instanceof RefusedError && error.status === 400;
    await assert.rejects(client.lock("both", options), isRefused);
  }
});

test("an unanswered acquire leaves no slot", inTime, async () => {
  for (const options of [{ slots: 3 }, { slots: 3, take: 2 }]) {
    await servers.order({ do: "swallow", count: 1 });
    await servers.order({ do: "refuse", status: 403 });
    await assert.rejects(new Client(servers.places.proxy).lock("left", { ...options, ttlMs: 60_000 }), RefusedError);
    await servers.order({ do: "refuse", status: 0 });
    await eventually("all slots are free", () => isFree("left"));
  }
});
