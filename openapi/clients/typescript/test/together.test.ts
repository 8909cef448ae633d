// Guards of one client renew together. A proxy in front of a real gateway counts the requests.

import assert from "node:assert/strict";
import { after, before, test } from "node:test";

import { Client, type Guard } from "redlock-gateway";

import { proxied } from "./proxied.js";
import { eventually, PATIENCE, type Servers, start, TTL } from "./servers.js";

const inTime = { timeout: 3 * PATIENCE };

let servers: Servers;
before(async () => {
  servers = await start();
});
after(() => servers.end());

async function acquired(client: Client, prefix: string, count: number): Promise<Guard[]> {
  const guards: Guard[] = [];
  for (let at = 0; at < count; at++) {
    guards.push(await client.lock(`${prefix}/${at}`, { ttlMs: TTL }));
  }
  return guards;
}

async function allExtended(guards: readonly Guard[], times = 1): Promise<void> {
  for (let time = 0; time < times; time++) {
    const extended = await Promise.all(guards.map((guard) => guard.extended()));
    assert.deepEqual([...new Set(extended)], [true], guards.map(({ loss }) => loss?.message).join());
  }
}

const release = (guards: readonly Guard[]): Promise<unknown> => Promise.all(guards.map((guard) => guard.release()));

test("fifty guards renew by few requests, and only the lost one is told lost", inTime, async () => {
  await using proxy = await proxied(servers);
  const guards = await acquired(new Client(proxy.url), "fifty", 50);
  const first = guards[0]!;
  await allExtended(guards);
  const before = { ...proxy };
  for (const begin = first.deadline; first.deadline - begin < 3 * TTL; await allExtended([first]));
  const [joint, single] = [proxy.joint - before.joint, proxy.single - before.single];
  // One by one it would be 450 and more. Guards acquired one after the other form a few groups.
  assert.ok(joint > 0 && joint + single <= 100, `${joint} joint requests and ${single} single ones`);
  guards.forEach((guard) => guard.check());

  const [taken] = guards.splice(7, 1);
  await new Client(servers.places.gateways[1]).forceRelease(taken!.name);
  const loss = await taken!.lost;
  assert.deepEqual([loss.kind, loss.lock], ["gone", "fifty/7"]);
  await allExtended(guards);
  await release(guards);
});

test("guards renew alone at a gateway that cannot extend many", inTime, async () => {
  for (const status of [404, 405]) {
    await using proxy = await proxied(servers, status);
    const guards = await acquired(new Client(proxy.url), `alone-${status}`, 5);
    await allExtended(guards, 3);
    // Groups that are due at the same time may each ask once before the first answer.
    assert.ok(proxy.joint > 0 && proxy.joint <= 3, `${proxy.joint} joint requests`);
    assert.ok(proxy.single >= 15, `${proxy.single} single requests`);
    await release(guards);
  }
});

test("a hung joint renewal loses no lock and holds up no release", inTime, async () => {
  await using proxy = await proxied(servers);
  const guards = await acquired(new Client(proxy.url), "hung", 5);
  proxy.hangs = true;
  await eventually("a joint renewal", async () => proxy.joint > 0);
  const [released] = guards.splice(0, 1);
  const begin = performance.now();
  await released!.release();
  // The proxy never answers the joint renewal.
  assert.ok(performance.now() - begin < 60_000);
  assert.equal(released!.loss, undefined);
  await allExtended(guards);
  await release(guards);
});

test("each result counts as the answer to its own request", inTime, async () => {
  await using proxy = await proxied(servers);
  const guards = await acquired(new Client(proxy.url), "each", 5);
  proxy.first = { status: 503, code: "outcome_unknown", detail: "ask again" };
  await allExtended(guards);
  await eventually("a joint renewal", async () => proxy.first === undefined);
  await allExtended(guards);

  proxy.first = { status: 409, code: "not_holder", detail: "d", holder: "mallory" };
  const loss = await Promise.race(guards.map(({ lost }) => lost));
  assert.deepEqual([loss.kind, loss.holder], ["taken", "mallory"]);
  const held = guards.filter((guard) => guard.loss === undefined);
  assert.equal(held.length, 4);
  await allExtended(held);
  await release(guards);
});

test("guards with different TTLs renew in different requests", inTime, async () => {
  await using proxy = await proxied(servers);
  const client = new Client(proxy.url);
  const guards = [await client.lock("ttl/a", { ttlMs: TTL }), await client.lock("ttl/b", { ttlMs: TTL + 1 })];
  await allExtended(guards, 2);
  assert.equal(proxy.joint, 0);
  await release(guards);
});
