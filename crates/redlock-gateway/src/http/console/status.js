// Says how fresh the page is.

import { byId, setText } from "./dom.js";
import { clock } from "./format.js";

/** The gateway sends a heartbeat every 15 s. */
const HEARTBEAT_MS = 15_000;
/** The readiness of a gateway that does not answer `/readyz`. */
export const SILENT = "silent";
/** A short break is called a reconnect; after that the page is stale. */
const SHORT_BREAK_MS = 5_000;

/**
 * The state of the page: a tone, a short text, and a sentence if something is wrong. `readiness` is
 * the status of `/readyz`, or `SILENT`: without a majority, an open stream shows what was.
 */
export function freshness({ state, error, heardAt }, now, readiness) {
  const silence = now - (heardAt ?? now);
  const since = heardAt === undefined ? "" : clock(heardAt);
  const stale = { tone: "bad", text: `stale since ${since}` };
  const why = error?.message ?? "";
  const isOpen = ["connecting", "live"].includes(state);
  if (isOpen && readiness === "no_quorum") {
    const sentence = "No majority of the masters votes, so the list may be old.";
    return { tone: "bad", text: "no majority", sentence };
  }
  switch (state) {
    case "live":
      if (silence >= HEARTBEAT_MS + SHORT_BREAK_MS) {
        return { ...stale, sentence: `Nothing has come since ${since}.` };
      }
      if (readiness === SILENT) {
        return { tone: "busy", text: "masters unknown", sentence: "" };
      }
      return { tone: "good", text: "live", sentence: "" };
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

/** Shows it at the top of the page, and in its title and icon. `figures` is the title of a live page. */
export function showFreshness(stream, readiness, figures, now = Date.now()) {
  const { tone, text, sentence } = freshness(stream, now, readiness);
  const title = `${tone === "good" ? figures : text} - ${location.host}`;
  if (document.title !== title) {
    document.title = title;
  }
  const icon = tone === "bad" ? "./icon-bad.svg" : "./icon.svg";
  if (byId("icon").getAttribute("href") !== icon) {
    byId("icon").setAttribute("href", icon);
  }
  const pill = byId("status");
  pill.className = `pill is-${tone}`;
  setText(pill, text);
  setText(byId("banner"), sentence);
  byId("banner").hidden = sentence === "";
  document.body.classList.toggle("is-stale", tone === "bad");
}
