// Says how fresh the page is.

import { byId, setText } from "./dom.js";
import { clock } from "./format.js";

/** The gateway sends a heartbeat every 15 s. */
const HEARTBEAT_MS = 15_000;
/** A short break is called a reconnect; after that the page is stale. */
const SHORT_BREAK_MS = 5_000;

/** The state of the stream: a tone, a short text, and a sentence if something is wrong. */
export function freshness({ state, error, heardAt }, now) {
  const silence = now - (heardAt ?? now);
  const since = heardAt === undefined ? "" : clock(heardAt);
  const stale = { tone: "bad", text: `stale since ${since}` };
  const why = error?.message ?? "";
  switch (state) {
    case "live":
      if (silence < HEARTBEAT_MS + SHORT_BREAK_MS) {
        return { tone: "good", text: "live", sentence: "" };
      }
      return { ...stale, sentence: `Nothing has come since ${since}.` };
    case "refused":
      if (error.status === 401) {
        return { tone: "busy", text: "key needed", sentence: `This gateway needs a key: ${why}` };
      }
      return { tone: "bad", text: "refused", sentence: `The gateway refused the list: ${why}` };
    case "broken":
      // Nothing has come so far.
      if (heardAt === undefined) {
        return { tone: "bad", text: "not connected", sentence: `Not connected: ${why}` };
      }
      if (silence < SHORT_BREAK_MS) {
        return { tone: "busy", text: "reconnecting", sentence: "" };
      }
      return {
        ...stale,
        sentence: `Not connected: ${why} The page shows what it knew at ${since}.`,
      };
    default:
      return { tone: "busy", text: "connecting", sentence: "" };
  }
}

/** Shows it at the top of the page. */
export function showFreshness(stream, now = Date.now()) {
  const { tone, text, sentence } = freshness(stream, now);
  const pill = byId("status");
  pill.className = `pill is-${tone}`;
  setText(pill, text);
  setText(byId("banner"), sentence);
  byId("banner").hidden = sentence === "";
  document.body.classList.toggle("is-stale", tone === "bad");
}
