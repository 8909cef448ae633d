// Waits in turns, and acquisitions that nobody answers.

import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer } from "node:net";
import type { AddressInfo } from "node:net";
import os from "node:os";
import { after, before, test } from "node:test";

import { Client, LockHeldError, SetupError, UnavailableError, type Waiting } from "redlock-gateway";

import { methods, scripted } from "./scripted.js";
import { eventually, PATIENCE, type Servers, start, TTL } from "./servers.js";

const inTime = { timeout: 2 * PATIENCE };

let servers: Servers;
before(async () => {
  servers = await start();
});
after(() => servers.end());

/** The answer to a turn of a wait. The short pause makes the tests fast. */
const turn = (position: number): [number, object] => [
  409,
  {
    retry_after_ms: 10,
    holder: "A",
    acquired_at: "2026-01-02T03:04:05.678Z",
    queue_position: position,
    queue_place_expires_ms: 10_000,
  },
];

/** A URL where somebody listens, who never answers, or nobody. */
async function listening(isOpen: boolean): Promise<AsyncDisposable & { url: string }> {
  const server = createServer(() => {}).listen(0, "127.0.0.1");
  await once(server, "listening");
  const url = `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
  if (!isOpen) {
    server.close();
    await once(server, "close");
  }
  return {
    url,
    async [Symbol.asyncDispose]() {
      server.close();
    },
  };
}

test("turns of a wait have one key and one gateway", inTime, async () => {
  await using first = await scripted({ POST: [turn(2), turn(2), turn(2), 201], DELETE: [204] });
  await using second = await scripted({ POST: [201], DELETE: [204] });
  const told: Waiting[] = [];
  const client = new Client({ url: [first.url, second.url] });
  const guard = await client.lock("a", {
    waitMs: 60_000,
    onWaiting: (waiting) => told.push(waiting),
    priority: 9,
    queue: "newest",
  });
  await guard.release();
  assert.deepEqual(methods(first), ["POST", "POST", "POST", "POST", "DELETE"]);
  assert.ok(first.bodies.every(({ priority, queue }) => priority === 9 && queue === "newest"));
  assert.deepEqual(methods(second), []);
  assert.equal(new Set(first.seen.slice(0, 4).map(([, key]) => key)).size, 1);
  const waits = first.bodies.map(({ wait_ms }) => wait_ms);
  assert.deepEqual(waits.slice(0, 3), [1_000, 5_000, 5_000]);
  const acquiredAt = new Date("2026-01-02T03:04:05.678Z");
  assert.deepEqual(told[0], { name: "a", position: 2, holder: "A", acquiredAt, gateway: first.url });
});

test("a guard shows the waiters of the last extension", inTime, async () => {
  await using server = await scripted({ POST: [201], PATCH: [200], DELETE: [204] });
  const guard = await new Client(server.url).lock("a", { ttlMs: TTL });
  assert.equal(guard.waiters, undefined);
  assert.ok(await guard.extended());
  assert.equal(guard.waiters, 2);
  await guard.release();
});

test("a lost place is said once", inTime, async () => {
  await using first = await scripted({ POST: [turn(3), 0] });
  await using second = await scripted({ POST: [turn(7), turn(6), 201], DELETE: [204] });
  const said: string[] = [];
  const client = new Client({ url: [first.url, second.url], warn: (_, error) => said.push(error.message) });
  await (await client.lock("a", { waitMs: 60_000 })).release();
  assert.deepEqual(said, [
    `lock "a": place in line lost: ${first.url} does not answer; now 7th in line at ${second.url}`,
  ]);
});

test("a failed wait gives its place up", inTime, async () => {
  await using server = await scripted({ POST: [turn(2)], DELETE: [204] });
  await assert.rejects(new Client(server.url).lock("a", { waitMs: 100 }), (error) => {
    assert.ok(error instanceof LockHeldError);
    assert.deepEqual([error.lock, error.position, error.holder], ["a", 2, "A"]);
    return true;
  });
  await eventually("the release", async () => methods(server).at(-1) === "DELETE");
  assert.equal(new Set(server.seen.map(([, key]) => key)).size, 1);
});

test("an onWaiting that throws leaves the acquisition alone", inTime, async () => {
  await using server = await scripted({ POST: [turn(2), 201], DELETE: [204] });
  const onWaiting = (): never => {
    throw new Error("the terminal is gone");
  };
  await (await new Client(server.url).lock("a", { waitMs: 60_000, onWaiting })).release();
});

test("nothing listening is said at once", inTime, async (context) => {
  const urls = [(await listening(false)).url, (await listening(false)).url];
  const { mock } = context.mock.method(globalThis, "fetch");
  const client = new Client({ url: urls });
  for (const ask of [() => client.lock("a"), () => client.status("a"), () => client.list()]) {
    mock.resetCalls();
    await assert.rejects(ask(), (error) => {
      assert.ok(error instanceof UnavailableError);
      return urls.every((url) => error.message.includes(`${url}: connect ECONNREFUSED`));
    });
    // Who asks again later asks each gateway more than once.
    assert.equal(mock.callCount(), 2);
  }
});

test("a wait outlasts a gateway that is not there", inTime, async () => {
  const begin = performance.now();
  await assert.rejects(new Client((await listening(false)).url).lock("a", { waitMs: 3_000 }), UnavailableError);
  const took = performance.now() - begin;
  // A client that awaits an answer as long as from a hung gateway gives up after 11 s.
  assert.ok(took >= 2_999 && took < 10_000, `${took} ms`);
});

test("a timeout bounds the whole acquisition", inTime, async () => {
  await using silent = await listening(true);
  const client = new Client({ url: [silent.url, silent.url] });
  const begin = performance.now();
  const text = /^lock "a": .* did not answer within/;
  await assert.rejects(client.lock("a", { waitMs: Infinity, timeoutMs: 1_000 }), {
    name: "UnavailableError",
    message: text,
  });
  assert.ok(performance.now() - begin < 60_000, `${performance.now() - begin} ms`);
});

test("a time without its unit is refused", async () => {
  const client = new Client("http://127.0.0.1:2");
  for (const option of ["ttl", "wait", "margin", "timeout"]) {
    await assert.rejects(client.lock("a", { [option]: 5 }), (error) => {
      assert.ok(error instanceof SetupError);
      assert.equal(
        error.message,
        `lock "a": there is no option ${option}: times are in milliseconds, so it is ${option}Ms`,
      );
      return true;
    });
  }
  for (const timeoutMs of [0, -1, 1.5, NaN, Infinity]) {
    await assert.rejects(client.lock("a", { timeoutMs }), { name: "SetupError", message: /^lock "a": timeoutMs is / });
  }
});

test("an unknown option is refused", async () => {
  const client = new Client("http://127.0.0.1:2");
  for (const option of ["wait_ms", "waitMS", "foo"]) {
    const text = `lock "a": there is no option ${option}: known are ttlMs, waitMs, `;
    await assert.rejects(client.lock("a", { [option]: 5 }), (error) => {
      assert.ok(error instanceof SetupError && error.message.startsWith(text), String(error));
      return true;
    });
  }
  assert.throws(
    () => new Client({ urls: ["http://127.0.0.1:2"] } as never),
    /there is no option urls: known are url, key/,
  );
});

test("the default owner names user, host, process and program", inTime, async () => {
  await using server = await scripted({ POST: [201], DELETE: [204] });
  const client = new Client(server.url);
  for (const owner of [undefined, "", "me"]) {
    await (await client.lock("a", { owner })).release();
  }
  const [standard, none, given] = server.bodies;
  const middle = `@${os.hostname()}:${process.pid} `;
  assert.ok(/^[^@]+@/.test(standard!.owner!) && standard!.owner!.includes(middle), standard!.owner);
  assert.deepEqual([none!.owner, given!.owner], [undefined, "me"]);
});

test("first come is first served over several turns", inTime, async () => {
  const { gateways } = servers.places;
  const heard: Record<string, Waiting[]> = { A: [], B: [] };
  const order: string[] = [];
  const wait = (owner: "A" | "B"): Promise<void> =>
    new Client({ url: gateways, maxTurnMs: 1_000 }).withLock(
      "fifo",
      { waitMs: 60_000, owner, onWaiting: (waiting) => heard[owner]!.push(waiting) },
      () => void order.push(owner),
    );
  const holder = new Client(gateways[0]);
  const guard = await holder.lock("fifo", { owner: "holder" });
  const first = wait("A");
  await eventually("the place of A", async () => heard["A"]!.length >= 1);
  const second = wait("B");
  await eventually("the place of B", async () => heard["B"]!.length >= 4);
  for (const [at, owner] of ["A", "B"].entries()) {
    for (const { position, holder, gateway } of heard[owner]!) {
      assert.deepEqual([position, holder, gateway], [at + 1, "holder", gateways[0]]);
    }
  }
  await guard.release();
  await Promise.all([first, second]);
  assert.deepEqual(order, ["A", "B"]);
});

test("a timeout leaves time to say who holds the lock", inTime, async () => {
  const client = new Client({ url: servers.places.gateways });
  await using guard = await client.lock("held", { owner: "alice" });
  // A busy machine may need more time for the answer than the client leaves.
  await eventually("an answer in time", async () => {
    const begin = performance.now();
    const error: unknown = await client.lock("held", { waitMs: PATIENCE, timeoutMs: 3_000 }).catch((error) => error);
    if (error instanceof UnavailableError) {
      return false;
    }
    const took = performance.now() - begin;
    assert.ok(error instanceof LockHeldError, String(error));
    assert.match(error.message, /^lock "held": .*alice/);
    assert.ok(took > 2_000 && took < 60_000, `${took} ms`);
    return true;
  });
  guard.check();
});
