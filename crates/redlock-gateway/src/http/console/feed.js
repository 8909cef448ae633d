// The feed of the last events, and the story of each lock: its earlier holders. An end and the next
// grant become one entry: a lock handed over.

import { gatewayNow } from "./api.js";
import { arrange, el, setText } from "./dom.js";
import { clock, counted, duration, label } from "./format.js";

const MOST_ENTRIES = 60;
/** How many ends of holds are kept for the stories of all locks together. */
const MOST_ENDS = 10_000;
/** A grant this soon after a release was a handover, even if this gateway knew of no waiter. */
const HANDOVER_MS = 300;
/** A grant this soon after a release with waiters was a handover. */
const HANDOVER_WITH_WAITERS_MS = 1_500;
/** Screen readers hear of forced and expired locks, and at most this often. */
const ANNOUNCE_PAUSE_MS = 10_000;

const WORDS = {
  held: "acquired",
  handed: "handed over",
  extended: "extended",
  released: "released",
  expired: "expired",
  forced: "forced",
  missed: "gap",
};

class Entry {
  constructor(type, { name, slot, ...data }, now) {
    this.type = type;
    this.at = now;
    this.name = name;
    this.slot = slot ?? 1;
    this.who = data.owner === undefined && data.fencing_token === undefined ? "" : label(data);
    /** How long the hold has lasted; NaN if the page may not know. */
    this.heldMs = Math.max(0, gatewayNow() - Date.parse(data.acquired_at ?? ""));
    this.beganAt = now - this.heldMs;
    this.text = undefined;
    this.element = undefined;
  }

  get sentence() {
    switch (this.type) {
      case "held":
      case "extended":
      case "released":
        return this.who === "" ? "" : `by ${this.who}`;
      case "handed":
        return `${this.from} → ${this.who}`;
      case "expired":
        return this.who === "" ? "" : `held by ${this.who}`;
      case "forced":
        return this.who === "" ? "" : `taken from ${this.who}`;
      default:
        return this.text;
    }
  }

  /** Makes the item of the feed, or makes it anew after a change. */
  render() {
    this.element ??= el("li");
    const name =
      this.name === undefined
        ? ""
        : el("button", { class: "name", type: "button", "data-lock": this.name }, this.name);
    this.element.replaceChildren(...this.#head(), " ", name, ...this.#tail());
  }

  /** Makes an item for the story of its lock. */
  ofStory() {
    if (Number.isNaN(this.heldMs)) {
      return el("li", {}, ...this.#head(), ...this.#tail());
    }
    const minor = (text) => el("span", { class: "minor" }, text);
    const held = this.heldMs < 1_000 ? "within 1 s" : `after ${duration(this.heldMs)}`;
    const from = minor(`${clock(this.beganAt)} – `);
    return el("li", {}, from, ...this.#head(), ...this.#tail(), " ", minor(held));
  }

  #head() {
    const time = el("time", { datetime: new Date(this.at).toISOString() }, clock(this.at));
    return [time, " ", el("span", { class: `what is-${this.type}` }, WORDS[this.type])];
  }

  #tail() {
    const slot = this.slot > 1 ? el("span", { class: "minor" }, `slot ${this.slot}`) : "";
    return [" ", slot, " ", el("span", { class: "who" }, this.sentence)];
  }
}

export class Feed {
  showsExtensions = false;
  isPaused = false;
  #list;
  #announcer;
  #entries = [];
  /** Ends of holds, and gaps. Oldest first. */
  #past = [];
  #changed = new Set();
  /** The last end of each slot, by lock and slot. */
  #ends = new Map();
  #toAnnounce = new Map();
  #announcedAt = 0;

  constructor({ list, announcer, onOpen }) {
    this.#list = list;
    this.#announcer = announcer;
    list.addEventListener("click", ({ target }) => {
      const name = target.closest("button")?.dataset.lock;
      if (name !== undefined) {
        onOpen(name);
      }
    });
  }

  /** How the last holds of a lock ended, and the gaps between; newest first. */
  story(name, most) {
    const isTold = (entry) => entry.name === name || entry.type === "missed";
    return this.#past.filter(isTold).slice(-most).reverse();
  }

  /** Takes an event of the stream. `hasWaiters`: whether somebody waits for the lock. */
  apply(type, data, hasWaiters, now = Date.now()) {
    const slot = `${data.slot ?? 1} ${data.name}`;
    switch (type) {
      case "held": {
        const end = this.#ends.get(slot);
        this.#ends.delete(slot);
        const isSoon = now - end?.at <= (end?.hasWaiters ? HANDOVER_WITH_WAITERS_MS : HANDOVER_MS);
        if (isSoon) {
          this.#handOver(end.entry, new Entry(type, data, now));
        } else {
          this.#add(new Entry(type, data, now));
        }
        break;
      }
      case "released": {
        const entry = new Entry(type, data, now);
        this.#ends.set(slot, { at: now, entry, hasWaiters });
        this.#add(entry);
        this.#remember(entry);
        break;
      }
      case "expired":
      case "forced": {
        const entry = new Entry(type, data, now);
        this.#add(entry);
        this.#remember(entry);
        this.#toAnnounce.set(type, (this.#toAnnounce.get(type) ?? 0) + 1);
        break;
      }
      case "extended":
        if (this.showsExtensions) {
          this.#add(new Entry(type, data, now));
        }
        break;
      case "lagged":
        this.gap(`${counted(data.missed, "event")} came faster than this page could read them.`);
        break;
      default:
    }
  }

  /** Says that events are missing. */
  gap(text) {
    const entry = new Entry("missed", {}, Date.now());
    entry.text = text;
    this.#add(entry);
    this.#remember(entry);
  }

  clear() {
    this.#entries = [];
    this.#past = [];
    this.#ends.clear();
    this.#toAnnounce.clear();
  }

  /** Brings the list up to date. */
  update() {
    if (this.isPaused) {
      return;
    }
    for (const entry of this.#entries) {
      if (entry.element === undefined || this.#changed.has(entry)) {
        entry.render();
      }
    }
    this.#changed.clear();
    arrange(
      this.#list,
      this.#entries.map(({ element }) => element),
    );
  }

  /** Tells screen readers what has happened, and forgets old ends. To be called now and then. */
  announce(now = Date.now()) {
    for (const [slot, end] of this.#ends) {
      if (now - end.at > HANDOVER_WITH_WAITERS_MS) {
        this.#ends.delete(slot);
      }
    }
    if (this.#toAnnounce.size > 0 && now - this.#announcedAt > ANNOUNCE_PAUSE_MS) {
      const parts = [...this.#toAnnounce].map(
        ([type, many]) => `${counted(many, "lock")} ${WORDS[type]}`,
      );
      setText(this.#announcer, `${parts.join(", ")}.`);
      this.#toAnnounce.clear();
      this.#announcedAt = now;
    }
  }

  #add(entry) {
    this.#entries.unshift(entry);
    if (this.#entries.length > MOST_ENTRIES) {
      this.#entries.pop().element = undefined;
    }
  }

  #remember(entry) {
    this.#past.push(entry);
    if (this.#past.length > MOST_ENDS) {
      this.#past.shift();
    }
  }

  #handOver(entry, next) {
    entry.type = "handed";
    entry.from = entry.who;
    entry.who = next.who;
    entry.at = next.at;
    this.#changed.add(entry);
    if (!this.#entries.includes(entry)) {
      this.#add(entry);
    }
  }
}
