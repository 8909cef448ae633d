// Sentences about locks and masters.

import { gatewayNow } from "./api.js";
import { duration, label, listed } from "./format.js";

/** Who holds a lock, in a few words. */
export function holders(lock) {
  if (lock.isUnknown) {
    return "unknown: too few masters answered";
  }
  if (!lock.isHeld) {
    return ENDED[lock.ended?.how] ?? "free";
  }
  const holds = lock.inOrder;
  if (holds.every((hold) => hold.isHidden)) {
    return "not shown to this key";
  }
  return listed([...new Set(holds.map(label))]);
}

const ENDED = {
  released: "released",
  expired: "expired",
  forced: "released by force",
};

/** How many slots are held: "3/4 slots". Empty for a lock without slots. */
export function slotsHeld(lock) {
  return lock.hasSlots ? `${lock.holds.size}/${lock.slots} slots` : "";
}

/** How long a hold lasts unless it is extended. */
export function timeLeft(hold, now) {
  const left = hold?.leftMs(now);
  if (left === undefined) {
    return hold === undefined || hold.isHidden ? "" : "no expiry";
  }
  return left === 0 ? "ending" : duration(left);
}

/** Since how long a hold lasts. */
export function heldFor(hold) {
  return hold?.acquiredAt === undefined ? "" : duration(gatewayNow() - hold.acquiredAt);
}

/** The fencing token of a lock. Each slot has its own order of tokens. */
export function token(lock) {
  return lock.holds.size > 1 ? "one for each slot" : String(lock.inOrder[0]?.token ?? "");
}

/** Who waits for a lock, in order. */
export function waiters(lock) {
  return lock.waiters === undefined ? "" : listed(lock.waiters.map(label), lock.waitersTotal);
}

/** What a master is doing: a tone for its colour, and words. */
export function masterState({ state, until, since }) {
  const now = gatewayNow();
  switch (state) {
    case "admitted":
      return { tone: "good", words: "votes" };
    case "catching_up":
      return { tone: "busy", words: "votes, still receives locks; restart no other master yet" };
    case "quarantined": {
      const left = Date.parse(until ?? "") - now;
      const when = left > 0 ? `votes in ${duration(left + 999)}` : "votes soon";
      return { tone: "busy", words: `recovering, ${when}` };
    }
    case "connecting":
      return { tone: "bad", words: `no connection for ${duration(now - Date.parse(since))}` };
    case "refused":
      return { tone: "bad", words: "refused, until an operator acts" };
    default:
      return { tone: "busy", words: state };
  }
}

/** Whether the gateway grants locks. */
export function readiness(status) {
  switch (status) {
    case "ready":
      return { tone: "good", words: "A majority votes. Locks are granted." };
    case "no_quorum":
      return { tone: "bad", words: "No majority votes. Nobody can get or extend a lock." };
    case "draining":
      return { tone: "busy", words: "This gateway is shutting down." };
    default:
      return { tone: "busy", words: status };
  }
}
