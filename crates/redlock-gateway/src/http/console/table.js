// The table of locks. It keeps one row for each lock on show, and changes only what differs.

import { Bar, SlotBars } from "./bars.js";
import { arrange, el, setText } from "./dom.js";
import { clock, count } from "./format.js";
import * as words from "./words.js";

/**
 * Most rows on show. With 2,000 locks and 100 events a second, 500 rows took up to 330 ms of the
 * browser at once on a busy machine, and 200 rows less than 200 ms.
 */
const MOST_ROWS = 200;
/** Sorting many locks takes a few milliseconds, so it happens at most this often. */
const SORT_PAUSE_MS = 400;
const MANY_LOCKS = 1_000;

class Row {
  #lock;
  #button = el("button", { class: "name", type: "button" });
  #holder = el("span", { class: "holder" });
  #key = el("span", { class: "minor" });
  #bar = new Bar();
  #slots = new SlotBars();
  #slotsHeld = el("span", { class: "minor" });
  #left = el("span", { class: "left" });
  #since = el("time", { class: "number" });
  #token = el("span", { class: "number" });
  #line = el("span", { class: "line" });
  #waiters = el("span", { class: "waiters" });

  constructor(name) {
    this.#button.append(name);
    this.#button.title = name;
    const cell = (className, ...children) =>
      el("td", { role: "cell", class: className }, ...children);
    this.element = el(
      "tr",
      { role: "row" },
      el("th", { role: "rowheader", scope: "row", class: "c-name" }, this.#button),
      cell("c-holder", this.#holder, " ", this.#key),
      cell("c-left", this.#left, " ", this.#slotsHeld, this.#bar.element, this.#slots.element),
      cell("c-since", this.#since),
      cell("c-token", this.#token),
      cell("c-line", this.#line, " ", this.#waiters),
    );
    this.element.dataset.lock = name;
  }

  /** Shows a changed lock. */
  update(lock, now) {
    this.#lock = lock;
    const first = lock.inOrder[0];
    const keys = new Set(lock.inOrder.map((hold) => hold.key).filter(Boolean));
    this.element.classList.toggle("is-free", !lock.isHeld);
    this.element.classList.toggle("is-unknown", lock.isUnknown);
    setText(this.#holder, words.holders(lock));
    const isInHolder = first?.owner === undefined;
    setText(this.#key, keys.size > 0 && !isInHolder ? `key ${[...keys].join(", ")}` : "");
    setText(this.#slotsHeld, words.slotsHeld(lock));
    this.#bar.element.hidden = lock.hasSlots || first?.endsAt === undefined;
    this.#slots.element.hidden = !lock.hasSlots;
    setText(this.#token, words.token(lock));
    setText(this.#line, lock.waitersTotal > 0 ? count(lock.waitersTotal) : "");
    this.#line.hidden = lock.waitersTotal === 0;
    setText(this.#waiters, words.waiters(lock));
    this.#waiters.title = words.waiters(lock);
    this.#holder.title = words.holders(lock);
    const { acquiredAt } = lock.oldest ?? {};
    if (acquiredAt === undefined) {
      this.#since.removeAttribute("datetime");
      this.#since.removeAttribute("title");
    } else {
      this.#since.dateTime = new Date(acquiredAt).toISOString();
      this.#since.title = `since ${clock(acquiredAt)}`;
    }
    this.tick(now);
  }

  /** Shows that time has passed. */
  tick(now) {
    const first = this.#lock.endsFirst;
    setText(this.#left, words.timeLeft(first, now));
    setText(this.#since, words.heldFor(this.#lock.oldest));
    if (this.#lock.hasSlots) {
      this.#slots.show(this.#lock, now);
    } else {
      this.#bar.show(first, now);
    }
  }

  focus() {
    this.#button.focus();
  }
}

/** The table, and the lines below it. */
export class LocksTable {
  order = "name";
  #rows = new Map();
  #shown = [];
  #sortedAt = 0;
  #isUnsorted = true;
  #body;
  #note;
  #empty;

  constructor({ body, note, empty, onOpen }) {
    this.#body = body;
    this.#note = note;
    this.#empty = empty;
    body.addEventListener("click", ({ target }) => {
      const row = target.closest("tr");
      if (row !== null && getSelection().isCollapsed) {
        // The browser puts the focus back there when the details are closed.
        this.#rows.get(row.dataset.lock)?.focus();
        onOpen(row.dataset.lock);
      }
    });
    body.addEventListener("keydown", (event) => this.#move(event));
  }

  /** The locks on show, in order. */
  get shown() {
    return this.#shown;
  }

  /** Sorts anew at the next update. */
  sortBy(order) {
    this.order = order;
    this.#isUnsorted = true;
    this.#sortedAt = 0;
  }

  /** Brings the table up to date. A sort that is not due yet happens at a later call. */
  update(locks, now = Date.now()) {
    this.#isUnsorted ||= locks.isReordered || (this.order !== "name" && locks.changed.size > 0);
    locks.isReordered = false;
    const isDue = locks.size < MANY_LOCKS || now - this.#sortedAt > SORT_PAUSE_MS;
    if (this.#isUnsorted && isDue) {
      this.#arrange(locks, now);
    }
    for (const name of locks.changed) {
      const lock = locks.get(name);
      if (lock !== undefined) {
        this.#rows.get(name)?.update(lock, now);
      }
    }
    locks.changed.clear();
  }

  /** Shows that time has passed. */
  tick(now = Date.now()) {
    for (const row of this.#rows.values()) {
      row.tick(now);
    }
  }

  #arrange(locks, now) {
    const sorted = locks.sorted(this.order);
    this.#shown = sorted.slice(0, MOST_ROWS);
    const rows = new Map();
    for (const lock of this.#shown) {
      let row = this.#rows.get(lock.name);
      if (row === undefined) {
        row = new Row(lock.name);
        row.update(lock, now);
      }
      rows.set(lock.name, row);
    }
    this.#rows = rows;
    const focused = document.activeElement;
    const place = [...this.#body.children].indexOf(focused.closest("tr"));
    arrange(
      this.#body,
      [...rows.values()].map(({ element }) => element),
    );
    if (place >= 0) {
      this.#keepFocus(focused, place);
    }
    const hidden = sorted.length - this.#shown.length;
    const cut = locks.isCut ? " The gateway does not show or follow all locks." : "";
    setText(
      this.#note,
      hidden > 0 || locks.isCut
        ? `${count(hidden)} more. Narrow the prefix to see them.${cut}`
        : "",
    );
    this.#note.hidden = hidden === 0 && !locks.isCut;
    this.#empty.hidden = sorted.length > 0;
    this.#sortedAt = now;
    this.#isUnsorted = false;
  }

  /** A row that moves or goes loses the focus. Then it goes back, or to the next row. */
  #keepFocus(focused, place) {
    if (focused.isConnected) {
      focused.focus();
    } else {
      const row = this.#body.children[Math.min(place, this.#body.children.length - 1)];
      row?.querySelector("button").focus();
    }
  }

  /** The arrow keys move between the locks. */
  #move(event) {
    const row = event.target.closest("tr");
    const next = {
      ArrowDown: row?.nextElementSibling,
      ArrowUp: row?.previousElementSibling,
      Home: this.#body.firstElementChild,
      End: this.#body.lastElementChild,
    }[event.key];
    if (next) {
      event.preventDefault();
      this.#rows.get(next.dataset.lock).focus();
    }
  }
}
