// The place of an acquisition in the line for its lock.

import { type Problem, RedlockError } from "./errors.js";

/** The longest label that a gateway accepts, in characters. */
const LONGEST_LABEL = 255;

/** What is known while an acquisition waits. What the gateway does not say is undefined. */
export interface Waiting {
  /** The lock's name. For a set it has all names, separated by commas. */
  readonly name: string;
  /**
   * The place in this gateway's line for the lock; 1 is next. A set is in the line of the lock that
   * refused it, and its place is not kept.
   */
  readonly position: number | undefined;
  /** The holder's label. */
  readonly holder: string | undefined;
  /** Since when the holder has the lock. */
  readonly acquiredAt: Date | undefined;
  /** The URL of the gateway that keeps the place. */
  readonly gateway: string;
}

/** The functions of the user that a place calls. */
export interface Listeners {
  onWaiting: ((waiting: Waiting) => void) | undefined;
  warn: ((message: string, error: Error) => void) | undefined;
}

export class Place {
  /** Whether the gateway keeps the place until the next request. */
  isKept = false;
  readonly #name: string;
  readonly #listeners: Listeners;
  #last: Waiting | undefined;

  constructor(name: string, listeners: Listeners) {
    this.#name = name;
    this.#listeners = listeners;
  }

  /** Notes the end of a turn: somebody else holds the lock. */
  refused(gateway: string, problem: Problem): void {
    const before = this.#last;
    const wasKept = this.isKept;
    const position = problem.queue_position;
    this.isKept = problem.queue_place_expires_ms !== undefined;
    this.#last = {
      name: this.#name,
      position,
      holder: problem.holder,
      acquiredAt: moment(problem.acquired_at),
      gateway,
    };
    // A set has no place that is kept between its requests.
    if (before?.position === undefined || !wasKept) {
      return;
    }
    const where = position === undefined ? "waiting" : `${ordinal(position)} in line`;
    if (before.gateway !== gateway) {
      this.#warn(`place in line lost: ${before.gateway} does not answer; now ${where} at ${gateway}`);
    } else if (position !== undefined && position > before.position) {
      this.#warn(`place in line lost; now ${where} at ${gateway}`);
    }
  }

  /** Tells the user of the place. */
  tell(): void {
    const { onWaiting } = this.#listeners;
    const waiting = this.#last;
    if (onWaiting !== undefined && waiting !== undefined) {
      later(() => onWaiting(waiting));
    }
  }

  #warn(text: string): void {
    const { warn } = this.#listeners;
    if (warn !== undefined) {
      later(() =>
        warn(`lock ${JSON.stringify(this.#name)}: a place in line was lost`, new RedlockError(text, this.#name)),
      );
    }
  }
}

/**
 * Calls a function of the user in a later turn of the event loop: if it blocks, it must not delay
 * those who await a result of this turn. Its exception, now or later, must not reach the caller.
 */
export function later(call: () => unknown): void {
  setTimeout(() => void new Promise<unknown>((resolve) => resolve(call())).catch(() => {}), 0);
}

function moment(text: string | undefined): Date | undefined {
  const date = new Date(text ?? NaN);
  return Number.isNaN(date.getTime()) ? undefined : date;
}

function ordinal(number: number): string {
  const ending = new Intl.PluralRules("en", { type: "ordinal" }).select(number);
  return `${number}${{ zero: "th", one: "st", two: "nd", few: "rd", many: "th", other: "th" }[ending]}`;
}

/** The parts of Node.js that this module uses. A browser has none of them. */
interface MaybeNode {
  process?: {
    pid?: number;
    argv?: string[];
    env?: Record<string, string | undefined>;
    getBuiltinModule?: (
      name: "node:os",
    ) => { hostname: () => string; userInfo: () => { username: string } } | undefined;
  };
}

/** Returns `user@host:pid program`, a label for people; undefined in a browser. */
export function defaultOwner(): string | undefined {
  const { process } = globalThis as MaybeNode;
  if (process?.pid === undefined) {
    return undefined;
  }
  const { pid, argv = [], env = {} } = process;
  const os = process.getBuiltinModule?.("node:os");
  let user = env["USER"] ?? env["USERNAME"] ?? "unknown";
  try {
    user = os?.userInfo().username ?? user;
  } catch {
    // The user has no entry in the list of users.
  }
  const host = os?.hostname() ?? env["HOSTNAME"] ?? "unknown";
  const program = (argv[1] ?? argv[0] ?? "node").split(/[/\\]/).at(-1);
  // A gateway refuses control characters and the like.
  const label = [...`${user}@${host}:${pid} ${program}`].map((each) =>
    /[\p{C}\p{Zl}\p{Zp}]/u.test(each) ? "?" : each,
  );
  return label.slice(0, LONGEST_LABEL).join("");
}
