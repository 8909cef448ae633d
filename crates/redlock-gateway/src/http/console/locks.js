// The locks that the page knows, kept up to date by the events of the stream.

/**
 * How long a lock is shown after its end, in milliseconds. A successor often follows at once, and a row
 * that went and came would flicker.
 */
const LINGER_MS = 500;

/** A slot of a lock that somebody holds. A lock without slots has one: slot 1. */
class Hold {
  constructor(status, now) {
    this.slot = status.slot ?? 1;
    /** How many slots the lock has at least. */
    this.slots = Math.max(this.slot, status.slots ?? 1);
    this.owner = status.owner;
    this.key = status.key;
    this.metadata = status.metadata ?? {};
    this.token = status.fencing_token;
    this.acquiredAt = Date.parse(status.acquired_at ?? "") || undefined;
    const left = status.expires_in_ms;
    /** When the hold ends unless it is extended, by the browser's clock. */
    this.endsAt = left === undefined ? undefined : now + left;
    /** The longest time left that was seen: the length of a full bar. */
    this.fullMs = left;
  }

  /** The same hold at a later time. */
  after(earlier) {
    if (earlier !== undefined && earlier.token === this.token && earlier.fullMs > this.fullMs) {
      this.fullMs = earlier.fullMs;
    }
    return this;
  }

  leftMs(now) {
    return this.endsAt === undefined ? undefined : Math.max(0, this.endsAt - now);
  }

  /** How full the bar is, from 0 to 1. */
  fraction(now) {
    return this.endsAt === undefined ? 1 : Math.min(1, this.leftMs(now) / (this.fullMs || 1));
  }

  /** Whether the key of this page may not see who holds the lock. */
  get isHidden() {
    return [this.owner, this.key, this.token, this.endsAt].every((known) => known === undefined);
  }
}

/** A lock that somebody holds or waits for. */
export class Lock {
  /** By slot. */
  holds = new Map();
  /** How many may hold the lock at once. */
  slots = 1;
  /** The first waiters in order; `undefined` if only their number is known. */
  waiters = undefined;
  waitersTotal = 0;
  /** Too few masters answered. */
  isUnknown = false;
  /** When the last hold ended, and the event that ended it. */
  ended = undefined;
  /** When the stream last said something about the lock. */
  toldAt = 0;

  constructor(name) {
    this.name = name;
  }

  get isHeld() {
    return this.holds.size > 0;
  }

  get hasSlots() {
    return this.slots > 1;
  }

  /** The holds in the order of their slots. */
  get inOrder() {
    return [...this.holds.values()].sort((a, b) => a.slot - b.slot);
  }

  put(hold) {
    this.holds.set(hold.slot, hold);
    this.slots = Math.max(...[...this.holds.values()].map(({ slots }) => slots));
  }

  /** The hold that ends first. */
  get endsFirst() {
    return least(this.holds.values(), (hold) => hold.endsAt ?? Infinity);
  }

  /** The hold that began first. */
  get oldest() {
    return least(this.holds.values(), (hold) => hold.acquiredAt ?? Infinity);
  }
}

function least(items, valueOf) {
  let found;
  for (const item of items) {
    if (found === undefined || valueOf(item) < valueOf(found)) {
      found = item;
    }
  }
  return found;
}

const byName = (a, b) => (a.name < b.name ? -1 : 1);
const ascending = (valueOf) => (a, b) => valueOf(a) - valueOf(b) || byName(a, b);

/** The orders of the table. */
export const ORDERS = {
  name: byName,
  waiting: ascending((lock) => -lock.waitersTotal),
  ending: ascending((lock) => lock.endsFirst?.endsAt ?? Number.MAX_SAFE_INTEGER),
  longest: ascending((lock) => lock.oldest?.acquiredAt ?? Number.MAX_SAFE_INTEGER),
};

/** All locks of the prefix. */
export class Locks {
  #byName = new Map();
  /** Names of locks that have changed since the view was last updated. */
  changed = new Set();
  /** Whether a lock has come or gone since then. */
  isReordered = true;
  /** Whether there are more locks than the gateway tells. */
  isCut = false;

  get(name) {
    return this.#byName.get(name);
  }

  get size() {
    return this.#byName.size;
  }

  clear() {
    this.#byName.clear();
    this.isReordered = true;
    this.isCut = false;
  }

  /** Takes an event of the stream. */
  apply(type, data, now = Date.now()) {
    switch (type) {
      case "snapshot":
        this.#replace(data, now);
        break;
      case "held":
      case "extended":
        this.#hold(data, now);
        break;
      case "released":
      case "expired":
      case "forced":
        this.#end(type, data, now);
        break;
      case "waiters":
        if (data.waiters_total > 0 || this.#byName.has(data.name)) {
          this.#line(this.#told(data, now), data, now);
        }
        break;
      default:
      // A newer gateway may have other events.
    }
  }

  /**
   * Takes an answer about one lock: who holds its slots, and who waits. The stream may have said
   * something newer since the question was asked. Then the answer is of no use.
   */
  inspected(status, askedAt, now = Date.now()) {
    if (this.get(status.name)?.toldAt >= askedAt) {
      return;
    }
    const lock = this.#made(status.name);
    const { holders = [] } = status;
    const earlier = lock.holds;
    lock.holds = new Map();
    if (holders.length > 0) {
      for (const holder of holders) {
        const known = earlier.get(holder.slot);
        const isKnown = known !== undefined && known.token === holder.fencing_token;
        const { key, metadata } = isKnown ? known : {};
        const { slots } = status;
        const hold = new Hold({ ...holder, owner: holder.holder, key, metadata, slots }, now);
        lock.put(hold.after(known));
      }
    } else if (status.state === "held") {
      const hold = new Hold(status, now);
      lock.put(hold.after(earlier.get(hold.slot)));
    }
    lock.isUnknown = status.state === "unknown";
    if (lock.isHeld) {
      lock.ended = undefined;
    }
    this.#line(lock, status, now);
  }

  /** Takes the line of a lock out of an answer about the lock, as above. */
  lined(status, askedAt, now = Date.now()) {
    const lock = this.get(status.name);
    if (lock !== undefined && lock.toldAt < askedAt) {
      this.#line(this.#made(status.name), status, now);
    }
  }

  /** Forgets locks that ended a while ago. */
  sweep(now = Date.now()) {
    for (const [name, lock] of this.#byName) {
      if (lock.ended !== undefined && now - lock.ended.at > LINGER_MS && lock.waitersTotal === 0) {
        this.#byName.delete(name);
        this.isReordered = true;
      }
    }
  }

  /** The numbers of held locks, and of waiters. */
  totals() {
    let held = 0;
    let waiting = 0;
    for (const lock of this.#byName.values()) {
      held += lock.isHeld ? 1 : 0;
      waiting += lock.waitersTotal;
    }
    return { held, waiting };
  }

  names() {
    return this.#byName.keys();
  }

  sorted(order) {
    return [...this.#byName.values()].sort(ORDERS[order]);
  }

  #replace({ locks = [], is_complete: isComplete = true }, now) {
    const earlier = this.#byName;
    this.#byName = new Map();
    for (const status of locks) {
      const lock = this.#made(status.name);
      if (status.state === "held") {
        const hold = new Hold(status, now);
        lock.put(hold.after(earlier.get(status.name)?.holds.get(hold.slot)));
      }
      lock.isUnknown ||= status.state === "unknown";
      lock.waitersTotal = Math.max(lock.waitersTotal, status.waiters_total ?? 0);
      lock.waiters ??= status.waiters;
      this.changed.add(status.name);
    }
    this.isReordered = true;
    this.isCut = !isComplete;
  }

  #hold(status, now) {
    const lock = this.#told(status, now);
    const hold = new Hold(status, now);
    const earlier = lock.holds.get(hold.slot);
    // An event about an earlier hold may come late.
    if (earlier?.token > hold.token) {
      return;
    }
    lock.put(hold.after(earlier));
    lock.isUnknown = false;
    lock.ended = undefined;
  }

  #end(how, status, now) {
    const lock = this.#told(status, now);
    const slot = status.slot ?? 1;
    const hold = lock.holds.get(slot);
    if (hold?.token > status.fencing_token) {
      return;
    }
    lock.holds.delete(slot);
    if (!lock.isHeld) {
      lock.ended = { at: now, how };
    }
  }

  #line(lock, { waiters = [], waiters_total: total = 0 }, now) {
    lock.waiters = waiters;
    lock.waitersTotal = total;
    if (!lock.isHeld && !lock.isUnknown) {
      lock.ended ??= { at: now, how: undefined };
    }
  }

  /** The lock that the stream says something about. */
  #told({ name }, now) {
    const lock = this.#made(name);
    lock.toldAt = now;
    return lock;
  }

  /** The lock of this name, made if it is not there. */
  #made(name) {
    this.changed.add(name);
    let lock = this.#byName.get(name);
    if (lock === undefined) {
      lock = new Lock(name);
      this.#byName.set(name, lock);
      this.isReordered = true;
    }
    return lock;
  }
}
