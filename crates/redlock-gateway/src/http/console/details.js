// The drawer about one lock: its holders, its line, the answers of the masters, its story.

import { lockPath, request } from "./api.js";
import { Bar } from "./bars.js";
import { copyButton, curl } from "./commands.js";
import { makeDialog, makeTitle } from "./dialogs.js";
import { arrange, el, setText } from "./dom.js";
import { clock, count, duration, label } from "./format.js";
import * as words from "./words.js";

/** How often the drawer asks for the answers of the masters. */
const ASK_MS = 5_000;
const MOST_EARLIER = 20;

/** One holder. */
class HoldCard {
  #hold;
  #bar = new Bar("is-wide");
  #left = el("span", { class: "number" });
  #since = el("span");
  #facts = el("dl");
  #title = el("h3");
  #force;

  constructor(onForce) {
    const button = { type: "button", class: "quiet-danger", click: onForce };
    this.#force = el("button", button, "Force release…");
    this.element = el(
      "section",
      { class: "hold" },
      this.#title,
      el("p", { class: "left" }, this.#left, this.#bar.element),
      this.#facts,
      this.#force,
    );
  }

  update(lock, hold, now, mayForce) {
    this.#force.hidden = !mayForce;
    const slot = lock.hasSlots ? `Slot ${hold.slot}: ` : "";
    setText(this.#title, slot + (hold.isHidden ? "held" : label(hold)));
    if (this.#hold !== hold) {
      this.#hold = hold;
      this.#facts.replaceChildren(...this.#rows(hold).flat());
    }
    this.tick(now);
  }

  tick(now) {
    const left = words.timeLeft(this.#hold, now);
    setText(this.#left, this.#hold.endsAt === undefined ? left : `${left} left unless extended`);
    this.#bar.element.hidden = this.#hold.endsAt === undefined;
    this.#bar.show(this.#hold, now);
    const { acquiredAt } = this.#hold;
    if (acquiredAt !== undefined) {
      setText(this.#since, `${clock(acquiredAt)}, for ${words.heldFor(this.#hold)}`);
    }
  }

  #rows(hold) {
    const row = (title, ...text) => [el("dt", {}, title), el("dd", {}, ...text)];
    const rows = [];
    if (hold.token !== undefined) {
      rows.push(row("Fencing token", String(hold.token)));
    }
    if (hold.acquiredAt !== undefined) {
      rows.push(row("Since", this.#since));
    }
    if (hold.key !== undefined) {
      rows.push(row("Key", hold.key));
    }
    for (const [name, value] of Object.entries(hold.metadata)) {
      rows.push(row(name, value));
    }
    return rows;
  }
}

export class Details {
  #locks;
  #feed;
  #onForce;
  #onAnswer;
  #name;
  /** Whether the key may release the lock by force. Not known before the first answer. */
  #mayForce;
  #timer;
  #shownStory = undefined;
  #cards = new Map();
  #title = makeTitle("details");
  #lead = el("p", { class: "lead" });
  #error = el("p", { class: "error", role: "alert" });
  #holds = el("div", { class: "holds" });
  #lineTitle = el("h3");
  #line = el("ol", { class: "waiters" });
  #lineNote = el("p", { class: "minor" });
  #answersTitle = el("h3", {}, "Answers of the masters");
  #answers = el("ul", { class: "answers" });
  #storyTitle = el("h3", {}, "Earlier holders that this page has seen");
  #story = el("ol", { class: "events" });
  #close = el("button", { type: "button", click: () => this.#dialog.close() }, "Close");
  #copies = el("p", { class: "copies" });
  #dialog;

  constructor({ locks, feed, onForce, onAnswer }) {
    this.#locks = locks;
    this.#feed = feed;
    this.#onForce = onForce;
    this.#onAnswer = onAnswer;
    this.#dialog = makeDialog(
      "details",
      "drawer",
      el("header", {}, this.#title, this.#close),
      el(
        "div",
        { class: "body" },
        this.#lead,
        this.#copies,
        this.#error,
        this.#holds,
        el("section", {}, this.#lineTitle, this.#line, this.#lineNote),
        el("section", {}, this.#answersTitle, this.#answers),
        el("section", {}, this.#storyTitle, this.#story),
      ),
    );
    this.#dialog.addEventListener("close", () => {
      clearInterval(this.#timer);
      this.#name = undefined;
    });
  }

  open(name) {
    this.#name = name;
    this.#mayForce = undefined;
    this.#shownStory = undefined;
    setText(this.#title, name);
    this.#copies.replaceChildren(
      copyButton("Copy name", () => name),
      copyButton("Copy curl", () => curl("GET", name)),
    );
    this.#fail("");
    this.#showAnswers([]);
    this.#cards.clear();
    this.update();
    if (!this.#dialog.open) {
      this.#dialog.showModal();
    }
    this.#close.focus();
    this.#ask(name, {});
    clearInterval(this.#timer);
    this.#timer = setInterval(() => {
      const slots = this.#locks.get(name)?.slots ?? 1;
      this.#ask(name, { slots });
    }, ASK_MS);
  }

  /** Shows what has changed. */
  update(now = Date.now()) {
    if (this.#name === undefined) {
      return;
    }
    const lock = this.#locks.get(this.#name);
    setText(this.#lead, `${lead(lock)} ${waiting(lock)}`);
    const earlier = this.#cards;
    this.#cards = new Map();
    for (const hold of lock?.inOrder ?? []) {
      const { slot } = hold;
      const card = earlier.get(slot) ?? new HoldCard(() => this.#onForce(this.#name, slot));
      card.update(lock, hold, now, this.#mayForce);
      this.#cards.set(slot, card);
    }
    arrange(
      this.#holds,
      [...this.#cards.values()].map(({ element }) => element),
    );
    this.#showLine(lock, now);
    this.#showStory();
  }

  /** Shows that time has passed. */
  tick(now = Date.now()) {
    if (this.#name !== undefined) {
      this.#cards.forEach((card) => card.tick(now));
      this.#showLine(this.#locks.get(this.#name), now);
    }
  }

  #showLine(lock, now) {
    const { waitersTotal: total = 0, waiters = [] } = lock ?? {};
    setText(this.#lineTitle, total > 0 ? `Waiting: ${count(total)}` : "Waiting");
    while (this.#line.children.length > waiters.length) {
      this.#line.lastChild.remove();
    }
    waiters.forEach((waiter, at) => {
      const item = this.#line.children[at] ?? this.#line.appendChild(el("li"));
      const since = Date.parse(waiter.waiting_since);
      const parts = [`for ${duration(now - since)}`];
      if (waiter.priority !== undefined) {
        parts.push(`priority ${waiter.priority}`);
      }
      if (waiter.is_away) {
        parts.push("away, its place is kept");
      }
      setText(item, `${label(waiter)} · ${parts.join(" · ")}`);
    });
    const hidden = total - waiters.length;
    const more = hidden > 0 ? `${count(hidden)} more wait. ` : "";
    const none = total === 0 ? "Nobody waits at this gateway. " : "";
    setText(this.#lineNote, `${none}${more}Each gateway has a line of its own.`);
  }

  #showAnswers(nodes) {
    this.#answersTitle.hidden = nodes.length === 0;
    this.#answers.replaceChildren(
      ...nodes.map(({ node, state, detail }) =>
        el("li", { title: detail }, el("span", { class: "minor" }, node), ` ${state}`),
      ),
    );
  }

  #showStory() {
    const entries = this.#feed.story(this.#name, MOST_EARLIER);
    const shown = entries.map(({ at, type }) => `${at} ${type}`).join();
    if (shown === this.#shownStory) {
      return;
    }
    this.#shownStory = shown;
    this.#storyTitle.hidden = entries.length === 0;
    this.#story.replaceChildren(...entries.map((entry) => entry.ofStory()));
  }

  #fail(text) {
    setText(this.#error, text);
    this.#error.hidden = text === "";
  }

  async #ask(name, query) {
    const askedAt = Date.now();
    try {
      const response = await request(lockPath(name, query));
      const status = await response.json();
      if (this.#name === name) {
        this.#locks.inspected(status, askedAt);
        this.#mayForce = status.may_force ?? true;
        this.update();
        this.#showAnswers(status.nodes ?? []);
        this.#fail("");
        this.#onAnswer();
      }
    } catch (error) {
      if (this.#name === name) {
        // The gateway may refuse to show the lock, and yet allow its release.
        this.#mayForce ??= true;
        this.update();
        this.#fail(error.message);
      }
    }
  }
}

/** One sentence about the line. */
function waiting({ waitersTotal = 0 } = {}) {
  return waitersTotal > 0 ? `Waiting here: ${count(waitersTotal)}.` : "";
}

/** One sentence about the whole lock. */
function lead(lock) {
  if (lock === undefined) {
    return "Nobody holds this lock.";
  }
  if (lock.isUnknown) {
    return "Too few masters answered. Nobody knows who holds this lock.";
  }
  if (!lock.isHeld) {
    return `Free since ${clock(lock.ended?.at ?? Date.now())}: ${words.holders(lock)}.`;
  }
  return lock.hasSlots ? `${lock.holds.size} of ${lock.slots} slots are held.` : "Held.";
}
