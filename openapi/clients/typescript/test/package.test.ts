// The package as a user gets it: its description, and consumers in CommonJS and as a module.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { after, before, test } from "node:test";
import { fileURLToPath } from "node:url";

import { type Servers, start } from "./servers.js";

const require = createRequire(import.meta.url);
const folder = dirname(require.resolve("redlock-gateway/package.json"));

let servers: Servers;
before(async () => {
  servers = await start();
});
after(() => servers.end());

function run(...program: string[]): string {
  return execFileSync(process.execPath, [...program, servers.places.gateways[0]], { encoding: "utf8" });
}

test("a consumer in CommonJS takes a lock", () => {
  assert.equal(run(fileURLToPath(new URL("consumer.cjs", import.meta.url))), "true jobs/consumer\ntrue\n");
});

test("a consumer that is a module takes a lock", () => {
  const program = `
    import { Client } from "redlock-gateway";
    const client = new Client(process.argv[1]);
    await client.withLock("jobs/consumer", async (_, guard) => console.log(guard.name));
  `;
  assert.equal(run("--input-type=module", "--eval", program), "jobs/consumer\n");
});

test("each kind of consumer gets its own build, with types", () => {
  assert.equal(require.resolve("redlock-gateway"), join(folder, "dist/cjs/index.js"));
  assert.equal(fileURLToPath(import.meta.resolve("redlock-gateway")), join(folder, "dist/esm/index.js"));
  for (const kind of ["cjs", "esm"]) {
    assert.match(readFileSync(join(folder, `dist/${kind}/index.d.ts`), "utf8"), /export \{ Client/);
  }
});

test("the description names licence, author and addresses", () => {
  const description = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
  assert.equal(description.license, "MIT OR Apache-2.0");
  assert.equal(description.author, "the redlock-gateway authors");
  for (const url of [description.homepage, description.repository.url, description.bugs.url]) {
    assert.match(url, /github\.com\/redlock-gateway\/redlock-gateway/);
  }
  for (const licence of ["LICENSE-MIT", "LICENSE-APACHE"]) {
    assert.ok(readFileSync(join(folder, licence), "utf8").length > 1_000);
  }
});
