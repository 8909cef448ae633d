// Reads the gateway's metrics: counts grants, refusals and handoffs.

const LINE = /^(redlock_operations_total|redlock_handoffs_total)\{([^}]*)\} ([0-9.e+]+)/;
const LABEL = /(\w+)="([^"]*)"/g;
/** Acquires that ended without the lock. A cancelled one is no refusal: its client went away. */
const REFUSALS = ["held", "no_quorum", "unknown", "refused"];

/** Sums up counters of a scrape: `{ grants, refusals, handoffs }`. */
export function counters(text) {
  const sums = { grants: 0, refusals: 0, handoffs: 0 };
  for (const line of text.split("\n")) {
    const [, name, labels, value] = LINE.exec(line) ?? [];
    if (name === "redlock_handoffs_total") {
      sums.handoffs += Number(value);
    } else if (name === "redlock_operations_total") {
      const { operation, outcome } = Object.fromEntries(
        [...labels.matchAll(LABEL)].map(([, key, word]) => [key, word]),
      );
      if (operation === "acquire" && outcome === "granted") {
        sums.grants += Number(value);
      } else if (operation === "acquire" && REFUSALS.includes(outcome)) {
        sums.refusals += Number(value);
      }
    }
  }
  return sums;
}

/** The last minutes of one counter, as rates a second. */
export class Rates {
  #last = undefined;
  /** `{ at, rate }`, oldest first. */
  points = [];

  constructor(keepMs) {
    this.keepMs = keepMs;
  }

  /** Takes the value of the counter at a time in milliseconds. */
  push(value, at) {
    if (this.#last !== undefined && at > this.#last.at) {
      // A counter that is smaller than before has begun anew, with the gateway.
      const grown = value >= this.#last.value ? value - this.#last.value : value;
      this.points.push({ at, rate: (grown * 1000) / (at - this.#last.at) });
    }
    this.#last = { value, at };
    while (this.points.length > 0 && this.points[0].at < at - this.keepMs) {
      this.points.shift();
    }
  }

  get latest() {
    return this.points.at(-1)?.rate ?? 0;
  }

  get largest() {
    return Math.max(0, ...this.points.map((point) => point.rate));
  }
}
