// The console: connects the stream and the polls with the views.

import { Problem, access, request, sleep } from "./api.js";
import { Charts } from "./charts.js";
import { copyButton, curl } from "./commands.js";
import { Details } from "./details.js";
import { byId, setText } from "./dom.js";
import { Feed } from "./feed.js";
import { Folders } from "./folders.js";
import { ForceDialog } from "./force.js";
import { clock, count } from "./format.js";
import { KeyDialog } from "./key.js";
import { Lines } from "./lines.js";
import { Locks, ORDERS } from "./locks.js";
import { Masters } from "./masters.js";
import { showFreshness } from "./status.js";
import { Stream } from "./stream.js";
import { LocksTable } from "./table.js";
import { bindTheme } from "./theme.js";

const READYZ_MS = 2_000;
/**
 * A gateway that is stopped accepts requests, and never answers. Over HTTP/1.1, a request also waits
 * in the browser while six streams are open.
 */
const READYZ_TIMEOUT_MS = 5_000;
/** As often as the gateway takes a sample. */
const HISTORY_MS = 3_000;
const SECOND_MS = 1_000;
/** Typing in the search box opens a new stream after this pause. */
const TYPING_MS = 300;

const locks = new Locks();
const feed = new Feed({ list: byId("feed"), announcer: byId("announcer"), onOpen: open });
const table = new LocksTable({
  body: byId("rows"),
  note: byId("more"),
  empty: byId("empty"),
  onOpen: open,
});
const lines = new Lines(locks, draw);
const masters = new Masters({
  list: byId("masters"),
  sentence: byId("readiness"),
  note: byId("masters-note"),
});
const folders = new Folders(byId("folders"), (prefix) => addressOf({ prefix }));
const charts = new Charts({
  place: byId("charts"),
  note: byId("charts-note"),
  title: byId("charts-title"),
});
const force = new ForceDialog(locks, say);
const details = new Details({
  locks,
  feed,
  onForce: (name, slot) => force.open(name, slot),
  onAnswer: draw,
});
const keys = new KeyDialog(restart);
const stream = new Stream({ onEvent, onState });

/** Ends the pauses of the polls. */
let polls = new AbortController();
/** Since when the stream is broken, if it is. */
let brokenSince;
let mayReadHistory = true;

function open(name) {
  details.open(name);
}

/** Tells people and screen readers what a click has done. */
function say(sentence) {
  setText(byId("announcer"), sentence);
}

// The stream.

function onEvent(type, data) {
  if (type === "snapshot" && brokenSince !== undefined) {
    feed.gap(`Reconnected. Events since ${clock(brokenSince)} are missing.`);
    brokenSince = undefined;
  }
  const lock = locks.get(data.name);
  const hasWaiters = lock?.waitersTotal > 0;
  locks.apply(type, data);
  feed.apply(type, data, hasWaiters);
  draw();
}

function onState() {
  if (stream.state === "broken") {
    brokenSince ??= stream.heardAt;
  }
  if (stream.error instanceof Problem && stream.error.status === 401) {
    keys.open(access.key === undefined ? "" : stream.error.message);
  }
  draw();
}

// Drawing: at most ten times a second, however many events come. A page that needs long to draw,
// draws less often, so that it stays usable.

const DRAW_PAUSE_MS = 100;
/** At most this part of the time is spent on drawing. */
const DRAW_SHARE = 1 / 5;
let drawnUntil = 0;
let isDrawing = false;
/** Whether a second has passed. */
let hasTicked = false;

function draw() {
  if (isDrawing) {
    return;
  }
  isDrawing = true;
  setTimeout(() => {
    requestAnimationFrame((began) => {
      isDrawing = false;
      drawNow();
      // The browser has drawn the frame before the timer fires.
      setTimeout(() => {
        const cost = performance.now() - began;
        drawnUntil = began + Math.max(DRAW_PAUSE_MS, cost / DRAW_SHARE);
      });
    });
  }, drawnUntil - performance.now());
}

function drawNow() {
  locks.sweep();
  table.update(locks);
  if (hasTicked) {
    hasTicked = false;
    table.tick();
    details.tick();
    masters.tick();
  }
  feed.update();
  details.update();
  force.update();
  lines.fill(table.shown);
  const { held, waiting } = locks.totals();
  setText(byId("held"), locks.isCut ? `${count(held)}+` : count(held));
  setText(byId("waiting"), count(waiting));
  setText(byId("empty"), emptiness());
  folders.update(settings().prefix, locks.names());
  const isFirst = locks.size === 0 && isLive();
  byId("first").hidden = !isFirst;
  if (isFirst) {
    const { prefix } = settings();
    // No part of a name may be empty, "." or "..".
    const folder = /(^|\/)(\.{0,2})$/.test(prefix) ? prefix : `${prefix}/`;
    setText(byId("first-command"), curl("POST", `${folder}demo`));
  }
  showFreshness(stream, masters.readiness, `${count(held)} held, ${count(waiting)} waiting`);
}

/** Whether the page shows what a majority of the masters stores. */
function isLive() {
  return stream.state === "live" && masters.readiness !== "no_quorum";
}

function emptiness() {
  if (stream.state === "connecting" && masters.readiness !== "no_quorum") {
    return "Reading the locks…";
  }
  if (isLive()) {
    const { prefix } = settings();
    return prefix === ""
      ? "Nobody holds a lock."
      : `Nobody holds a lock that begins with “${prefix}”.`;
  }
  return "Nothing is known now.";
}

setInterval(() => {
  hasTicked = true;
  feed.announce();
  draw();
}, SECOND_MS);

// Polls.

async function pollReadiness() {
  for (;;) {
    try {
      const signal = AbortSignal.timeout(READYZ_TIMEOUT_MS);
      const response = await request("../readyz", { expected: [503], signal });
      masters.update(await response.json());
    } catch {
      masters.fail();
    }
    await sleep(READYZ_MS, polls.signal);
  }
}

async function pollHistory() {
  for (;;) {
    let pause = HISTORY_MS;
    if (mayReadHistory) {
      try {
        const response = await request("./history");
        charts.update(await response.json());
      } catch (error) {
        mayReadHistory = ![401, 403, 404].includes(error.status);
        pause = Math.max(pause, error.pauseMs || 0);
        if (!mayReadHistory) {
          charts.say("A key with the metrics permission also sees grants, refusals, handoffs and waiters.");
        }
      }
    }
    await sleep(pause, polls.signal);
  }
}

// Settings: the prefix and the order are in the address, so that a bookmark keeps them.

function settings() {
  const parameters = new URLSearchParams(location.hash.slice(1));
  const order = parameters.get("order");
  return {
    prefix: parameters.get("prefix") ?? "",
    order: Object.hasOwn(ORDERS, order) ? order : "name",
  };
}

/** The address of the page with these changes of the settings. */
function addressOf(changes) {
  const { prefix, order } = { ...settings(), ...changes };
  const parameters = new URLSearchParams();
  if (prefix !== "") {
    parameters.set("prefix", prefix);
  }
  if (order !== "name") {
    parameters.set("order", order);
  }
  return `#${parameters}`;
}

function change(changes) {
  history.replaceState(null, "", addressOf(changes));
  applySettings();
}

let followed;

function applySettings() {
  const { prefix, order } = settings();
  const search = byId("prefix");
  if (document.activeElement !== search) {
    search.value = prefix;
  }
  byId("order").value = order;
  table.sortBy(order);
  if (prefix !== followed) {
    followed = prefix;
    restart();
  }
  draw();
}

/** Begins anew, with another prefix or another key. */
function restart() {
  locks.clear();
  feed.clear();
  lines.reset();
  brokenSince = undefined;
  mayReadHistory = true;
  stream.follow(followed);
  polls.abort();
  polls = new AbortController();
  draw();
}

// Controls.

function hasModifier(event) {
  return event.ctrlKey || event.metaKey || event.altKey;
}

function bindControls() {
  const search = byId("prefix");
  let typing;
  search.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => change({ prefix: search.value.trim() }), TYPING_MS);
  });
  search.addEventListener("keydown", (event) => {
    if (event.key === "Enter") {
      clearTimeout(typing);
      change({ prefix: search.value.trim() });
    } else if (event.key === "ArrowDown") {
      event.preventDefault();
      byId("rows").querySelector("button")?.focus();
    }
  });
  byId("first").append(copyButton("Copy", () => byId("first-command").textContent));
  byId("search").addEventListener("submit", (event) => event.preventDefault());
  byId("order").addEventListener("change", ({ target }) => change({ order: target.value }));
  byId("key-button").addEventListener("click", () => keys.open());
  byId("extensions").addEventListener("change", ({ target }) => {
    feed.showsExtensions = target.checked;
  });
  byId("pause").addEventListener("click", ({ currentTarget }) => {
    feed.isPaused = !feed.isPaused;
    currentTarget.setAttribute("aria-pressed", feed.isPaused);
    draw();
  });
  byId("skip").addEventListener("click", (event) => {
    event.preventDefault();
    search.focus();
  });
  document.addEventListener("keydown", (event) => {
    const isTyping = event.target.matches?.("input, select, textarea, dialog *");
    if (event.key === "/" && !isTyping && !hasModifier(event)) {
      event.preventDefault();
      search.focus();
      search.select();
    } else if (
      /^Arrow(Down|Up)$/.test(event.key) &&
      event.target === document.body &&
      !hasModifier(event)
    ) {
      event.preventDefault();
      const rows = byId("rows").children;
      const row = event.key === "ArrowDown" ? rows[0] : rows[rows.length - 1];
      row?.querySelector("button").focus();
    }
  });
  addEventListener("hashchange", applySettings);
  bindTheme(byId("theme"));
}

setText(byId("host"), location.host);
bindControls();
applySettings();
pollReadiness();
pollHistory();
