// Acquires that end with a refusal, and logs that block, over a small server that follows a script.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { test } from "node:test";

import { Client, LockHeldError, RefusedError } from "redlock-gateway";

import { methods, scripted } from "./scripted.js";
import { PATIENCE } from "./servers.js";

const inTime = { timeout: 2 * PATIENCE };

test("a refusal after a lost answer releases by key", inTime, async () => {
  for (const unanswered of [0, 502]) {
    for (const status of [400, 401, 403, 409, 413, 422]) {
      await using server = await scripted({ POST: [unanswered, status], DELETE: [204] });
      await assert.rejects(new Client(server.url).lock("a"), status === 409 ? LockHeldError : RefusedError);
      assert.deepEqual(methods(server), ["POST", "POST", "DELETE"], `${status} after ${unanswered}`);
      assert.equal(new Set(server.seen.map(([, key]) => key)).size, 1, "the key of the POSTs");
    }
  }
});

test("a refusal of every POST releases nothing", inTime, async () => {
  for (const status of [403, 409]) {
    await using server = await scripted({ POST: [429, status], DELETE: [204] });
    await assert.rejects(new Client(server.url).lock("a"), RefusedError);
    assert.deepEqual(methods(server), ["POST", "POST"]);
  }
});

test("an unanswered release by key ends in time", inTime, async () => {
  await using server = await scripted({ POST: [0, 403], DELETE: [0] });
  const begin = performance.now();
  await assert.rejects(new Client(server.url).lock("a"), RefusedError);
  // It is 2 s, and a busy machine may add some.
  assert.ok(performance.now() - begin < 20_000, "2 s at most");
});

// The program of a user whose log writes at once, and more than fits into its pipe, which nobody
// reads. The program reports each step on its standard output.
const PROGRAM = `
  import { execFileSync } from "node:child_process";
  import { writeSync } from "node:fs";
  import { Client } from "redlock-gateway";

  const warn = (message) => execFileSync("cat", { input: message.padEnd(2 ** 20), stdio: ["pipe", 2, "ignore"] });
  const guard = await new Client({ url: process.argv[2], warn }).lock("a", { ttlMs: 900 });
  const step = (text) => () => writeSync(1, text + "\\n");
  setInterval(() => {}, 1_000); // A guard does not keep a process alive.
  if (process.argv[1] === "loss") {
    await guard.lost.then(step("told"));
  } else {
    await guard.release().catch(step("ended"));
  }
`;

/** Returns the first step that a user's program reports. */
async function firstStep(kind: "loss" | "release", url: string): Promise<string> {
  const user = spawn(process.execPath, ["--input-type=module", "--eval", PROGRAM, kind, url], {
    stdio: ["ignore", "pipe", "pipe"],
    // With its children, which write to the pipe.
    detached: true,
  });
  user.stderr.pause();
  try {
    return await new Promise((resolve) => {
      user.stdout.once("data", (data) => resolve(String(data).trim()));
      setTimeout(() => resolve("nothing"), PATIENCE).unref();
    });
  } finally {
    process.kill(-user.pid!, "SIGKILL");
    user.stdout.destroy();
    user.stderr.destroy();
  }
}

test("a log that blocks delays no report of a loss", inTime, async () => {
  await using server = await scripted({ POST: [201], PATCH: [404], DELETE: [404] });
  assert.equal(await firstStep("loss", server.url), "told");
});

test("a log that blocks delays no end of a release", inTime, async () => {
  await using server = await scripted({ POST: [201], DELETE: [403] });
  assert.equal(await firstStep("release", server.url), "ended");
});
