// What needs no server.

import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import os from "node:os";
import { test } from "node:test";

import { Client, now, SetupError, UnavailableError } from "redlock-gateway";

/** Nobody listens there. Of the ports that are so, fetch refuses the better known ones by itself. */
const NOWHERE = "http://127.0.0.1:2";

test("what cannot work is named, and no password with it", async () => {
  for (const url of ["localhost:8080", "ftp://a", "http://user:key@a", "http://a/?b", "", []]) {
    assert.throws(
      () => new Client({ url }),
      (error) => error instanceof SetupError && /URL/.test(error.message) && !/key@/.test(error.message),
    );
  }
  assert.throws(() => new Client({ url: NOWHERE, key: "a\nb" }), SetupError);
  const client = new Client(`${NOWHERE}/team-a/`);
  for (const name of ["", ".", "..", "\ud800"]) {
    await assert.rejects(client.lock(name), SetupError);
  }
  for (const options of [
    { ttlMs: NaN },
    { ttlMs: 1.5 },
    { ttlMs: 0 },
    { waitMs: -1 },
    { ttlMs: 1_000, marginMs: 500 },
  ]) {
    await assert.rejects(client.lock("a", options), SetupError);
  }
});

test("where nobody listens, what was heard of each gateway is told", async () => {
  const status = new Client({ url: [NOWHERE, "http://localhost:2"] }).status("a");
  await assert.rejects(status, (error) => {
    assert.ok(error instanceof UnavailableError);
    assert.equal(error.heard.length, 2);
    return error.heard.every((heard) => /ECONNREFUSED/.test(heard));
  });
});

const hasUptime = process.platform === "linux" && "getBuiltinModule" in process;

test("a sleep counts once, also where the wall clock was set back by as much", { skip: !hasUptime }, (context) => {
  const [uptime, wall] = [os.uptime, Date.now];
  for (const isSetBack of [true, false]) {
    const before = now();
    context.mock.method(os, "uptime", () => uptime() + 60);
    if (!isSetBack) {
      context.mock.method(Date, "now", () => wall() + 60_000);
    }
    // On a busy machine a reading may take too long to count. The next one then sees the sleep.
    let tries = 0;
    while (now() - before < 58_000 && tries < 100) {
      tries += 1;
    }
    const after = [now() - before, now() - before];
    context.mock.restoreAll();
    assert.ok(
      after.every((passed) => passed > 58_000 && passed < 70_000),
      `${after}`,
    );
    assert.ok(now() - before < 70_000, "what jumps back does not count");
  }
});

test("await using works where Symbol.asyncDispose is missing", () => {
  const script = `
    const real = globalThis.Symbol;
    const old = (text) => real(text);
    for (const key of Reflect.ownKeys(real)) {
      if (!["asyncDispose", "prototype", "length", "name"].includes(key)) {
        Object.defineProperty(old, key, Object.getOwnPropertyDescriptor(real, key));
      }
    }
    globalThis.Symbol = old;
    const { Client } = await import("redlock-gateway");
    if (typeof Symbol.asyncDispose !== "symbol" || Symbol.asyncDispose === real.asyncDispose) throw new Error("not supplied");
    const { Guard } = await import(new URL("guard.js", import.meta.resolve("redlock-gateway")));
    if (typeof Guard.prototype[Symbol.asyncDispose] !== "function") throw new Error("not used");
  `;
  const { status, stderr } = spawnSync(process.execPath, ["--input-type=module", "--eval", script], {
    encoding: "utf8",
  });
  assert.equal(status, 0, stderr);
});
