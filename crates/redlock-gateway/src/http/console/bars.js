// Bars: the time left of a hold, and the slots of a lock.

import { el } from "./dom.js";

/** With more slots than this, a lock has one bar for all. */
const MOST_SEGMENTS = 64;

/** A bar is low when less is left. A holder extends when a third of its TTL has passed. */
const LOW = 1 / 3;
/** A bar is urgent when less is left: no extension came although two of them were due. */
const URGENT = 1 / 10;

/** A bar that a script fills. Screen readers skip it, because the text beside it says the same. */
export class Bar {
  constructor(className = "") {
    this.fill = el("span");
    this.element = el("span", { class: `bar ${className}`, "aria-hidden": "true" }, this.fill);
  }

  /** `fraction` is from 0 to 1. */
  set(fraction, isUrgent = false, isLow = false) {
    this.fill.style.transform = `scaleX(${fraction.toFixed(3)})`;
    this.element.classList.toggle("is-low", isLow && !isUrgent);
    this.element.classList.toggle("is-urgent", isUrgent);
  }

  /** Shows the time left of a hold; nothing for `undefined`. */
  show(hold, now) {
    const fraction = hold?.fraction(now) ?? 0;
    this.set(fraction, fraction < URGENT, fraction < LOW);
  }
}

/** The slots of a lock: a short bar for each, filled while somebody holds it. */
export class SlotBars {
  element = el("span", { class: "slots", "aria-hidden": "true" });
  #bars = [];

  show(lock, now) {
    if (lock.slots > MOST_SEGMENTS) {
      this.#resize(1);
      this.#bars[0].set(lock.holds.size / lock.slots);
      return;
    }
    this.#resize(lock.slots);
    this.#bars.forEach((bar, at) => bar.show(lock.holds.get(at + 1), now));
  }

  #resize(length) {
    if (this.#bars.length !== length) {
      this.#bars = Array.from({ length }, () => new Bar("is-slot"));
      this.element.replaceChildren(...this.#bars.map(({ element }) => element));
    }
  }
}
