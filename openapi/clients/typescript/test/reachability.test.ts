// Gateways that cannot be reached, or whose answers are lost.

import assert from "node:assert/strict";
import dns from "node:dns";
import { syncBuiltinESMExports } from "node:module";
import { after, before, test } from "node:test";

import { Client, RefusedError, UnavailableError } from "redlock-gateway";

import { eventually, extended, PATIENCE, type Servers, start } from "./servers.js";

const inTime = { timeout: 2 * PATIENCE };

let servers: Servers;
let client: Client;
before(async () => {
  servers = await start();
  client = new Client({ url: servers.places.gateways });
});
after(() => servers.end());

test("a lock is extended when names cannot be resolved any more", inTime, async (context) => {
  // Between two extensions the connection is idle for longer than Node.js keeps it by itself, which is 4 s.
  const { port } = new URL(servers.places.gateways[0]);
  const guard = await new Client(`http://localhost:${port}`).lock("unresolved", { ttlMs: 18_000 });
  context.mock.method(dns, "lookup", (...given: unknown[]) => {
    (given.at(-1) as (error: Error) => void)(new Error("no name server"));
  });
  syncBuiltinESMExports();
  await assert.rejects(
    fetch(`http://localhost:${port}/livez`, { headers: { connection: "close" } }).then((r) => r.text()),
  );
  await extended(guard, 1);
  guard.check();
  await guard.release();
});

test("a release without a gateway ends after five seconds at most", inTime, async () => {
  const said: string[] = [];
  const guard = await new Client({
    url: servers.places.gateways,
    warn: (message) => said.push(message),
    // The longest TTL: a release that is tried until the deadline takes minutes.
  }).lock("left", { ttlMs: 300_000 });
  await servers.order({ do: "stop-gateway", index: 0 });
  await servers.order({ do: "stop-gateway", index: 1 });
  try {
    const begin = performance.now();
    await guard[Symbol.asyncDispose]();
    assert.ok(performance.now() - begin < 60_000, `${performance.now() - begin} ms`);
    // The line comes in a later turn of the event loop.
    await eventually("the line", async () => said.some((message) => message.includes("ends with its TTL")));
  } finally {
    await servers.order({ do: "continue-gateway", index: 0 });
    await servers.order({ do: "continue-gateway", index: 1 });
  }
});

test("an acquire that nobody answered, or that was given up, leaves no lock", inTime, async () => {
  const swallowed = new Client(servers.places.proxy);
  const isFree = async (name: string): Promise<boolean> => (await client.status(name)).state === "free";
  await servers.order({ do: "swallow", count: 1_000_000 });
  try {
    await assert.rejects(swallowed.lock("unanswered", { ttlMs: 60_000 }), UnavailableError);
    await eventually("it is free", () => isFree("unanswered"));
    await assert.rejects(swallowed.lock("given-up", { ttlMs: 60_000, signal: AbortSignal.timeout(1_000) }));
    await eventually("it is free", () => isFree("given-up"));
  } finally {
    await servers.order({ do: "swallow", count: 0 });
  }
});

test("a refusal after a lost answer leaves no lock", inTime, async () => {
  await servers.order({ do: "swallow", count: 1 });
  await servers.order({ do: "refuse", status: 403 });
  try {
    await assert.rejects(new Client(servers.places.proxy).lock("refused", { ttlMs: 60_000 }), RefusedError);
    await eventually("it is free", async () => (await client.status("refused")).state === "free");
  } finally {
    await servers.order({ do: "refuse", status: 0 });
  }
});
