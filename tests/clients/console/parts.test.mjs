// Tests of the parts of the console that need no browser.

import assert from "node:assert/strict";
import { test } from "node:test";

const console_ = "../../../crates/redlock-gateway/src/http/console";
const { EventParser } = await import(`${console_}/sse.js`);
const { Locks } = await import(`${console_}/locks.js`);
const { Feed } = await import(`${console_}/feed.js`);
const { covered } = await import(`${console_}/charts.js`);
const { clock, duration, listed } = await import(`${console_}/format.js`);
const { folderAbove, foldersBelow } = await import(`${console_}/folders.js`);
const { SILENT, freshness } = await import(`${console_}/status.js`);

const NOW = Date.parse("2026-01-02T03:04:05Z");
const plain = (text) => text.replaceAll("\u00a0", " ");

function held(name, token, more = {}) {
  return {
    name,
    state: "held",
    owner: "ana",
    fencing_token: token,
    expires_in_ms: 30_000,
    ...more,
  };
}

test("events are found however the stream is cut", () => {
  const stream = "retry: 1000\r\n:\nid: 7\nevent: held\ndata: {}\n\ndata: a\ndata:b\n\n";
  const expected = [
    { id: "7", type: "held", data: "{}" },
    { id: "7", type: "message", data: "a\nb" },
  ];
  for (let size = 1; size <= stream.length; size++) {
    const parser = new EventParser();
    const events = [];
    for (let at = 0; at < stream.length; at += size) {
      events.push(...parser.push(stream.slice(at, at + size)));
    }
    assert.deepEqual(events, expected, `pieces of ${size}`);
    assert.equal(parser.retry, 1000);
  }
});

test("a snapshot replaces all locks, and joins the slots of one", () => {
  const locks = new Locks();
  locks.apply("held", held("old", 1), NOW);
  const slots = { slots: 4 };
  const listing = [held("pool", 2, slots), held("pool", 3, { slot: 3, ...slots }), held("a", 4)];
  locks.apply("snapshot", { locks: listing }, NOW);
  assert.deepEqual(
    locks.sorted("name").map(({ name }) => name),
    ["a", "pool"],
  );
  assert.deepEqual([...locks.get("pool").holds.keys()], [1, 3]);
  assert.equal(locks.get("pool").slots, 4);
  assert.deepEqual(locks.totals(), { held: 2, waiting: 0 });
});

test("the end of an earlier hold does not end the present one", () => {
  const locks = new Locks();
  locks.apply("held", held("a", 6), NOW);
  locks.apply("expired", { name: "a", state: "free", fencing_token: 5 }, NOW);
  assert.equal(locks.get("a").holds.get(1).token, 6);
  locks.apply("held", held("a", 5), NOW);
  assert.equal(locks.get("a").holds.get(1).token, 6);
  locks.apply("released", { name: "a", state: "free", fencing_token: 6 }, NOW);
  assert.equal(locks.get("a").isHeld, false);
});

test("a free lock goes within a second, unless somebody waits", () => {
  const locks = new Locks();
  for (const name of ["a", "b"]) {
    locks.apply("held", held(name, 1), NOW);
    locks.apply("released", { name, state: "free", fencing_token: 1 }, NOW);
  }
  locks.apply("waiters", { name: "b", waiters: [{ owner: "bob" }], waiters_total: 1 }, NOW);
  locks.sweep(NOW + 300);
  assert.equal(locks.size, 2);
  locks.sweep(NOW + 1_000);
  assert.deepEqual(
    locks.sorted("name").map(({ name }) => name),
    ["b"],
  );
});

test("the bar of a hold is full again after an extension", () => {
  const locks = new Locks();
  locks.apply("held", held("a", 1), NOW);
  const fraction = (now) => locks.get("a").holds.get(1).fraction(now);
  assert.equal(fraction(NOW), 1);
  assert.equal(fraction(NOW + 15_000), 0.5);
  locks.apply("extended", held("a", 1), NOW + 15_000);
  assert.equal(fraction(NOW + 15_000), 1);
  locks.apply("snapshot", { locks: [held("a", 1, { expires_in_ms: 10_000 })] }, NOW + 35_000);
  assert.equal(fraction(NOW + 35_000).toFixed(2), "0.33");
});

test("an answer that is older than the stream is dropped", () => {
  const locks = new Locks();
  locks.apply("held", held("a", 2), NOW + 10);
  locks.inspected({ name: "a", state: "free" }, NOW);
  assert.equal(locks.get("a").isHeld, true);
  locks.inspected({ name: "a", state: "free" }, NOW + 20);
  assert.equal(locks.get("a").isHeld, false);
});

test("a key without inspect sees that a lock is held", () => {
  const locks = new Locks();
  locks.apply("held", { name: "a", state: "held" }, NOW);
  assert.equal(locks.get("a").holds.get(1).isHidden, true);
  locks.apply("released", { name: "a", state: "free" }, NOW);
  assert.equal(locks.get("a").isHeld, false);
});

test("a shorter history is called by its length", () => {
  const history = { age_ms: [63_000, 60_000], length_ms: [3_000, 3_000] };
  assert.equal(plain(covered(history)), "1 min 06 s");
  assert.equal(covered({ age_ms: [299_000], length_ms: [3_000] }), "5 minutes");
});

test("a story has the ends of one lock, however many events came since", () => {
  const feed = new Feed({ list: { addEventListener() {} } });
  const owned = (owner, token) => ({ name: "a", owner, fencing_token: token });
  feed.apply("released", owned("ana", 1), true, NOW);
  for (let token = 0; token < 100; token++) {
    feed.apply("released", { ...owned("other", token), name: "b" }, false, NOW);
  }
  feed.apply("held", owned("bob", 2), true, NOW + 200);
  feed.gap("Events are missing.");
  feed.apply("forced", owned("bob", 2), false, NOW + 400);
  const told = (most) => feed.story("a", most).map(({ type, sentence }) => `${type} ${sentence}`);
  assert.deepEqual(told(9), [
    "forced taken from bob",
    "missed Events are missing.",
    "handed ana → bob",
  ]);
  assert.deepEqual(told(1), ["forced taken from bob"]);
});

test("durations and lists read well", () => {
  const texts = [0, 21_900, 252_000, 7_500_000, 273_600_000].map((ms) => plain(duration(ms)));
  assert.deepEqual(texts, ["0 s", "21 s", "4 min 12 s", "2 h 05 min", "3 d 04 h"]);
  assert.equal(listed(["a", "b"]), "a, b");
  assert.equal(listed(["a", "b", "c", "d"], 1_204), "a, b, c and 1,201 more");
});

test("the page says when it is stale", () => {
  const words = (stream, now) => freshness(stream, now).text;
  assert.equal(words({ state: "live", heardAt: NOW }, NOW + 16_000), "live");
  assert.equal(words({ state: "live", heardAt: NOW }, NOW + 21_000), `stale since ${clock(NOW)}`);
  const live = { state: "live", heardAt: NOW };
  assert.equal(freshness(live, NOW, "ready").tone, "good");
  assert.deepEqual(freshness(live, NOW, "no_quorum"), {
    tone: "bad",
    text: "no majority",
    sentence: "No majority of the masters votes, so the list may be old.",
  });
  assert.equal(freshness({ state: "connecting" }, NOW, "no_quorum").text, "no majority");
  assert.equal(freshness(live, NOW, SILENT).text, "masters unknown");
  assert.equal(freshness(live, NOW + 21_000, SILENT).text, `stale since ${clock(NOW)}`);
  assert.equal(words({ state: "broken", heardAt: NOW }, NOW + 1_000), "reconnecting");
  assert.equal(words({ state: "broken", heardAt: NOW }, NOW + 9_000), `stale since ${clock(NOW)}`);
});

test("the folders are one level below the prefix", () => {
  const names = ["a/1", "a/2", "a/b/1", "c/1", "d", "a"];
  assert.deepEqual(foldersBelow("", names), [
    ["a/", 3],
    ["c/", 1],
  ]);
  assert.deepEqual(foldersBelow("a/", names), [["a/b/", 1]]);
  assert.deepEqual(["a", "a/", "a/b", "a/b/"].map(folderAbove), ["", "", "a/", "a/"]);
});
