// Drives the console of a real gateway with a real Chromium.
//
//   node check.mjs        starts masters and gateways by tests/clients/servers.py
//   node check.mjs URL    uses a gateway without keys; leaves out what needs servers of its own
//
// REDLOCK_GATEWAY: the gateway's binary. CONSOLE_TOOLS: where the npm packages are.
// CHROMIUM: the browser. SCREENSHOTS: a folder for pictures.

import assert from "node:assert/strict";
import { join } from "node:path";

import { Console, launch, PATIENCE } from "./browser.mjs";
import { Client, LONG, start } from "./servers.mjs";

const HERE = import.meta.dirname;
const [url] = process.argv.slice(2);
const servers =
  url === undefined
    ? await start(
        process.env.REDLOCK_SERVERS ?? join(HERE, "../servers.py"),
        process.env.REDLOCK_GATEWAY,
      )
    : undefined;
const gateway = url ?? servers.places.gateways[0];
const client = new Client(gateway);
const browser = await launch();
let failed = 0;

/** Runs a scenario. The others run even if this one fails. */
async function scenario(what, run) {
  const began = performance.now();
  try {
    await run();
    console.log(`ok ${what}, ${Math.round(performance.now() - began)} ms`);
  } catch (error) {
    failed += 1;
    console.log(`FAILED ${what}: ${error.stack}`);
  }
}

/** Runs a scenario in a tab that shows the console with this prefix. */
function shown(what, prefix, run, at = gateway) {
  return scenario(what, async () => {
    const console_ = await Console.open(browser, `${at}/console/#prefix=${prefix}`);
    await run(console_);
    await console_.close();
  });
}

await scenario("the documents are accessible", async () => {
  for (const name of ["", "http", "recipes", "configuration", "safety"]) {
    const page = await Console.open(browser, `${gateway}/docs/${name}`);
    await page.shows("h1", /./);
    await page.isAccessibleEverywhere(`docs-${name}`);
    await page.close();
  }
});

const first = { owner: "first on host-1", metadata: { run: "4711" } };

await shown("a lock appears, is handed over in order, and is released", "order/", async (page) => {
  await page.shows("#status", /^live$/);
  await page.shows("#empty", /^Nobody holds a lock that begins with “order\/”\.$/);
  const lease = await client.acquire("order/a", first);
  await page.row("order/a", new RegExp(`first on host-1 .*${lease.fencing_token}`));
  await page.row("order/a", /\b[45][0-9] s\b/);
  await page.feed(/acquired order\/a by first on host-1/);
  const second = client.wait("order/a", "second");
  await page.row("order/a", /1 second$/);
  const third = client.wait("order/a", "third");
  await page.row("order/a", /2 second, third$/);
  for (const width of [900, 1100, 1300]) {
    await page.look({ size: { width, height: 900 } });
    const room = await page.page.$eval("td.c-line", (cell) => cell.clientWidth);
    assert.ok(room >= 120, `at ${width} px, the line of waiters has ${room} px`);
  }
  await page.look({});
  await client.release(lease);
  await page.row("order/a", /second .*1 third$/);
  await page.feed(/handed over order\/a first on host-1 → second/);
  await client.release(await second);
  await page.row("order/a", /third/);
  await page.page.click('tr[data-lock="order/a"]');
  const handed = (from, to) => `[0-9:]+ – [0-9:]+ handed over ${from} → ${to} (after|within) \\d+`;
  const story = `${handed("second", "third")}.*${handed("first on host-1", "second")}`;
  await page.shows("#details", new RegExp(`Earlier holders that this page has seen.*${story}`));
  await page.isAccessibleEverywhere("story");
  await page.page.keyboard.press("Escape");
  await client.release(await third);
  await page.feed(/released order\/a by third/);
  await page.gone("order/a");
});

await shown("a lock expires", "expiring/", async (page) => {
  await page.shows("#status", /^live$/);
  await client.acquire("expiring/a", { ttl_ms: 5_000, owner: "crashed" });
  await page.row("expiring/a", /crashed/);
  await page.feed(/expired expiring\/a held by crashed/);
  await page.gone("expiring/a");
});

await shown("an extension fills the bar, and is no event by default", "longer/", async (page) => {
  await page.shows("#status", /^live$/);
  const lease = await client.acquire("longer/a", { ttl_ms: 60_000, owner: "ana" });
  await page.row("longer/a", /ana [0-9]+ s/);
  // Each extension moves the end by minutes: small ones are no events.
  await client.extend(lease, { ttl_ms: LONG - 120_000 });
  await page.row("longer/a", /ana [23] min [0-9]+ s/);
  assert.doesNotMatch(await page.text("#feed"), /extended/);
  await page.page.click("#extensions");
  await client.extend(lease, { ttl_ms: LONG });
  await page.feed(/extended longer\/a by ana/);
  await client.release(lease);
});

await shown("a lock with slots shows how many are held", "pool/", async (page) => {
  const lease = await client.acquire("pool/a", { slots: 4, take: 2, owner: "build 1" });
  await page.row("pool/a", /build 1 .*2\/4 slots/);
  const more = await client.acquire("pool/a", { slots: 4, owner: "build 2" });
  // Any free slot may be granted, and the holders stand in the order of their slots.
  await page.row("pool/a", /(build 1, build 2|build 2, build 1) .*3\/4 slots/);
  await page.isAccessibleEverywhere("slots");
  await client.release(lease);
  await page.row("pool/a", /build 2 .*1\/4 slots/);
  await client.release(more);
});

await shown("a lock is forced after a confirmation", "stuck/", async (page) => {
  await page.shows("#status", /^live$/);
  await client.acquire("stuck/a", first);
  const waiting = client.wait("stuck/a", "next");
  await page.row("stuck/a", /1 next$/);
  await page.page.focus('tr[data-lock="stuck/a"] button');
  await page.page.keyboard.press("Enter");
  await page.shows("#details", /first on host-1.*run 4711.*Waiting: 1 next/);
  await page.isAccessibleEverywhere("details");
  await page.click("Force release…");
  await page.shows("#force", /Force release stuck\/a\? first on host-1 holds it since/);
  await page.shows("#force", /learns of it only at its next extension/);
  await page.shows("#force", /only a resource that checks fencing tokens refuses its writes/);
  await page.shows("#force", /1 client waits here\. next is next\./);
  await page.isAccessibleEverywhere("force");
  await page.click("Force release");
  await page.shows("#details", /next .*left unless extended/);
  await page.feed(/forced stuck\/a taken from first on host-1/);
  // The event may come before the answer, and Escape closes the innermost dialog.
  await page.page.waitForSelector("#force:not([open])");
  await page.page.keyboard.press("Escape");
  await page.page.waitForSelector("#details:not([open])");
  await client.release(await waiting);
});

await shown("the keyboard and the address lead to a prefix", "", async (page) => {
  const leases = [await client.acquire("keys/a", first), await client.acquire("other/b", first)];
  await page.row("other/b", /first/);
  await page.page.keyboard.press("/");
  await page.page.keyboard.type("keys/");
  await page.gone("other/b");
  await page.row("keys/a", /first/);
  assert.match(page.page.url(), /#prefix=keys%2F$/);
  await page.page.keyboard.press("ArrowDown");
  await page.page.keyboard.press("Enter");
  await page.shows("#details h2", /^keys\/a$/);
  await page.page.keyboard.press("Escape");
  await page.page.reload();
  await page.row("keys/a", /first/);
  await page.gone("other/b");
  await Promise.all(leases.map((lease) => client.release(lease)));
});

await shown("text from clients is never HTML", "text/", async (page) => {
  const owner = "<img src=x onerror=alert(1)>";
  const lease = await client.acquire("text/a", { owner, metadata: { "<b>": owner } });
  await page.row("text/a", /<img src=x/);
  await page.page.click('tr[data-lock="text/a"]');
  await page.shows("#details", /<b> <img src=x/);
  assert.equal(await page.page.$("img, #details b"), null);
  await client.release(lease);
});

await shown("masters, charts, and an empty page", "nothing/", async (page) => {
  await page.shows("#readiness", /^A majority votes\. Locks are granted\.$/);
  await page.shows("#masters", /^127\.0\.0\.1:\d+ votes 127\.0\.0\.1:\d+ votes 127/);
  await page.shows("#charts", /Grants [0-9.,]+\/s peak .*Refusals .*Handoffs .*Waiting /);
  await page.shows("#charts-title", /^This gateway, last \d+ (s|min|minutes)\b/);
  await page.shows("#first", /^Take the first lock: curl -X POST 'http.*\/locks\/nothing%2Fdemo' Copy$/);
  await page.isAccessibleEverywhere("empty");
});

await shown("folders lead down and up, and an arrow key to the first lock", "", async (page) => {
  const leases = [await client.acquire("tree/a/1", first), await client.acquire("tree/b", first)];
  await page.row("tree/b", /first/);
  const names = await page.page.$$eval("#rows tr", (rows) => rows.map((row) => row.dataset.lock));
  for (const [key, name] of [
    ["ArrowDown", names[0]],
    ["ArrowUp", names.at(-1)],
  ]) {
    await page.page.evaluate(() => document.activeElement.blur());
    await page.page.keyboard.press(key);
    await page.page.keyboard.press("Enter");
    assert.equal(await page.shows("#details h2", /./), name);
    await page.page.keyboard.press("Escape");
    await page.page.waitForSelector("#details:not([open])");
  }
  await page.click("tree/ 2");
  await page.shows("#folders", /^↑ up a\/ 1$/);
  await page.click("a/ 1");
  await page.gone("tree/b");
  await page.click("↑ up");
  await page.row("tree/b", /first/);
  await page.titled(/^2 held, 0 waiting - /);
  await Promise.all(leases.map((lease) => client.release(lease)));
});

await shown("an EventSource in a page follows a lock", "source/", async (page) => {
  // The extension below moves the end by minutes: small ones are no events.
  const lease = await client.acquire("source/a", { ...first, ttl_ms: 60_000 });
  const types = page.page.evaluate(
    () =>
      new Promise((resolve) => {
        const source = new EventSource("../locks/source%2Fa");
        const seen = [];
        for (const type of ["snapshot", "extended", "released"]) {
          source.addEventListener(type, () => {
            seen.push(type);
            globalThis.seen = seen.length;
            if (type === "released") {
              source.close();
              resolve(seen);
            }
          });
        }
      }),
  );
  for (const end = Date.now() + PATIENCE; !(await page.page.evaluate(() => globalThis.seen));) {
    assert.ok(Date.now() < end, "no snapshot");
  }
  await client.extend(lease, { ttl_ms: LONG });
  await client.release(lease);
  assert.deepEqual(await types, ["snapshot", "extended", "released"]);
});

await shown("many locks are counted, and the first 200 are shown", "crowd/", async (page) => {
  const names = Array.from({ length: 203 }, (_, at) => `crowd/${at}`);
  const leases = await Promise.all(names.map((name) => client.acquire(name, first)));
  await page.shows("#held", /^203$/);
  await page.shows("#more", /^3 more\. Narrow the prefix to see them\.$/);
  assert.equal(await page.page.$$eval("#rows tr", (rows) => rows.length), 200);
  await Promise.all(leases.map((lease) => client.release(lease)));
  await page.shows("#held", /^0$/);
});

if (servers !== undefined) {
  const { gateways, keyed, admin } = servers.places;

  await shown("what another gateway does is shown within seconds", "other/", async (page) => {
    await page.shows("#status", /^live$/);
    const other = new Client(gateways[1]);
    const lease = await other.acquire("other/a", { owner: "elsewhere" });
    await page.row("other/a", /elsewhere/);
    await other.release(lease);
    await page.gone("other/a");
  });

  await shown(
    "a key is asked for, refused, and kept for the tab",
    "jobs/",
    async (page) => {
      await page.shows("#status", /^key needed$/);
      await page.shows("#key", /API key/);
      await page.isAccessibleEverywhere("key");
      await page.type("#key-input", "wrong");
      await page.page.keyboard.press("Enter");
      await page.shows("#key-error", /./);
      await page.type("#key-input", admin);
      await page.page.keyboard.press("Enter");
      await page.shows("#status", /^live$/);
      await new Client(keyed, admin).acquire("jobs/a", { owner: "somebody" });
      await page.row("jobs/a", /somebody key admin/);
      await page.shows("#masters", /votes/);
      await page.page.reload();
      await page.row("jobs/a", /somebody/);
      await page.page.click('tr[data-lock="jobs/a"]');
      await page.click("Force release…");
      await page.click("Force release");
      await page.feed(/forced jobs\/a taken from somebody/);
    },
    keyed,
  );

  await shown(
    "a key without the permission is offered no forced release",
    "seen/",
    async (page) => {
      await page.enterKey(servers.places.viewer);
      await page.shows("#status", /^live$/);
      await new Client(keyed, admin).acquire("seen/a", { owner: "somebody" });
      await page.row("seen/a", /somebody/);
      await page.page.click('tr[data-lock="seen/a"]');
      const text = await page.shows("#details", /somebody .*left unless extended.* node-1 held/);
      assert.doesNotMatch(text, /Force/);
    },
    keyed,
  );

  await shown(
    "a key that may not list is told so",
    "jobs/",
    async (page) => {
      await page.enterKey(servers.places.key);
      await page.shows("#status", /^refused$/);
      await page.shows("#banner", /^The gateway refused the list: ./);
      await page.shows("#masters-note", /A key with the metrics permission/);
    },
    keyed,
  );

  await shown("a master that lost its data recovers", "quiet/", async (page) => {
    await page.shows("#masters", /votes/);
    await servers.order({ do: "restart-master", index: 0 });
    await page.shows("#masters", /recovering, votes in \d+ (min|s)/);
    const help = await page.page.$eval("#masters .is-busy a", (link) => link.href);
    assert.equal(help, `${gateway}/docs/masters`);
    await page.isAccessibleEverywhere("recovering");
    await page.shows("#masters", /(votes 127[0-9.:]+ ){2}votes$/);
    // There was no grant since this page was opened. The gateway has kept the earlier ones.
    await page.shows("#charts", /Grants 0\/s peak [0-9.,]*[1-9]/);
  });

  await shown("without a majority the page is not live", "majority/", async (page) => {
    await page.shows("#status", /^live$/);
    await servers.order({ do: "stop-masters", count: 2 });
    await page.shows("#status", /^no majority$/);
    await page.shows("#banner", /^No majority of the masters votes, so the list may be old\.$/);
    await page.shows("#readiness", /What to do$/);
    await page.titled(/^no majority - /);
    await page.shows("#empty", /^Nothing is known now\.$/);
    await page.shows("#first:not([hidden])", /^$/);
    await page.page.reload();
    await page.shows("#status", /^no majority$/);
    await page.shows("#empty", /^Nothing is known now\.$/);
    await page.titled(/^no majority - /);
    await page.isAccessibleEverywhere("majority");
    await servers.order({ do: "continue-masters" });
    await page.shows("#status", /^live$/);
    await page.shows("#masters", /^127[0-9.:]+ votes 127[0-9.:]+ votes 127[0-9.:]+ votes$/);
  });

  await shown("the page says when its gateway is gone, and comes back", "gone/", async (page) => {
    const lease = await client.acquire("gone/a", first);
    await page.row("gone/a", /first/);
    await servers.order({ do: "stop-gateway", index: 0 });
    await page.shows("#status", /^(masters unknown|stale since .*)$/);
    await page.shows("#readiness", /^No answer from \/readyz, so the state of the masters is unknown\.$/);
    await servers.order({ do: "continue-gateway", index: 0 });
    await page.shows("#status", /^live$/);
    await servers.order({ do: "kill-gateway", index: 0 });
    // A busy machine may show the first state for a moment only.
    await page.shows("#status", /^(reconnecting$|stale since )/);
    await page.shows("#status", /^stale since /);
    await page.shows("#readiness", /^No answer from \/readyz, so the state of the masters is unknown\.$/);
    await page.row("gone/a", /first/);
    await page.isAccessibleEverywhere("stale");
    await servers.order({ do: "start-gateway", index: 0 });
    await page.shows("#status", /^live$/);
    await page.row("gone/a", /first/);
    await page.shows("#charts-title", /^This gateway, last \d+ s$/);
    await client.release(lease);
    await page.gone("gone/a");
  });
}

await browser.close();
await servers?.end();
process.exit(failed === 0 ? 0 : 1);
