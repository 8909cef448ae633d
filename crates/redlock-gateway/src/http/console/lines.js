// Asks for the waiters of locks on show. A listing has only their number, and the stream tells
// their labels only when the line changes.

import { Problem, lockPath, request } from "./api.js";

const MOST_AT_ONCE = 2;

export class Lines {
  #asking = new Set();
  #isForbidden = false;

  constructor(locks, onAnswer) {
    this.locks = locks;
    this.onAnswer = onAnswer;
  }

  /** The key is another one: it may be allowed what the earlier one was not. */
  reset() {
    this.#isForbidden = false;
  }

  fill(shown) {
    for (const lock of shown) {
      if (this.#isForbidden || this.#asking.size >= MOST_AT_ONCE) {
        return;
      }
      if (lock.waitersTotal > 0 && lock.waiters === undefined && !this.#asking.has(lock.name)) {
        this.#ask(lock.name);
      }
    }
  }

  async #ask(name) {
    this.#asking.add(name);
    const askedAt = Date.now();
    try {
      // One slot is the least that masters can be asked for. Only the line is of interest.
      const response = await request(lockPath(name, { slots: 1 }));
      this.locks.lined(await response.json(), askedAt);
    } catch (error) {
      // Whatever the reason: asking for other locks would fail, too. The numbers are still right.
      this.#isForbidden = true;
      if (!(error instanceof Problem)) {
        setTimeout(() => this.reset(), 10_000);
      }
    } finally {
      this.#asking.delete(name);
      this.onAnswer();
    }
  }
}
