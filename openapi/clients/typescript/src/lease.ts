// The part of a granted or extended lease that a client needs, and the results of requests about
// several locks.

import { now } from "./clock.js";
import type { Problem } from "./errors.js";

export interface Granted {
  token: string;
  fencingToken: number;
  validity: number;
  elapsed: number;
  /** How many wait for the lock at the gateway; undefined if the answer does not tell. */
  waiters: number | undefined;
  /** The slots of the lock that are held; undefined if the answer does not tell. */
  slotsHeld: readonly number[] | undefined;
}

/** Reads a lease. Throws if the answer is none, because a deadline of NaN would never come. */
export function granted(data: unknown): Granted {
  const answer = (data ?? {}) as Record<string, unknown>;
  const { token, fencing_token, validity_ms, elapsed_ms, waiters, slots_held } = answer;
  if (typeof token !== "string" || !/^[A-Za-z0-9.-]+$/.test(token)) {
    throw new Error("the answer has no token");
  }
  const lease = { token, fencingToken: fencing_token, validity: validity_ms, elapsed: elapsed_ms };
  for (const number of [lease.fencingToken, lease.validity, lease.elapsed]) {
    if (!Number.isSafeInteger(number) || (number as number) < 0) {
      throw new Error("the answer has no lease");
    }
  }
  return {
    ...lease,
    waiters: typeof waiters === "number" ? waiters : undefined,
    slotsHeld: Array.isArray(slots_held) ? slots_held : undefined,
  } as Granted;
}

/**
 * Returns the moment until which a lease may be trusted. `sent` is when the request was sent, `ttl`
 * the TTL it asked for. Time on the network counts against the validity. Time in the gateway does
 * not, because the gateway computes the validity afterwards. An answer with more than `ttl`, or
 * with more elapsed time than has passed, is cut to these.
 */
export function deadlineOf(
  { elapsed, validity }: Pick<Granted, "elapsed" | "validity">,
  sent: number,
  ttl: number,
): number {
  return sent + Math.min(elapsed, now() - sent) + Math.min(validity, ttl);
}

/**
 * Codes of a gateway for a token that no longer holds its lock. A proxy's error page has a status,
 * but no code.
 */
const LOSSES: readonly string[] = ["lock_not_found", "not_holder", "max_hold_reached"];

/** Returns whether a code means that the token no longer holds its lock. */
export function isLoss(code: string): boolean {
  return LOSSES.includes(code);
}

/** The result for one lock of a request about several. */
export interface Result {
  name: string;
  status: number;
  code?: string;
  detail?: string;
  holder?: string;
  retry_after_ms?: number;
}

/** Reads an answer with one result for each lock. */
export function resultsOf<T extends Result>(data: unknown, count: number): readonly T[] {
  const { results } = (data ?? {}) as { results?: unknown };
  if (!Array.isArray(results) || results.length !== count) {
    throw new Error("the answer has no result for each lock");
  }
  return results as T[];
}

/** Returns what a result says of a lock for which the request has failed. */
export function problemOf({ status, code = "", detail = "", holder, retry_after_ms }: Result): Problem {
  return {
    status,
    code,
    detail,
    ...(holder !== undefined && { holder }),
    ...(retry_after_ms !== undefined && { retry_after_ms }),
  };
}

/** Returns the problem with the longest pause before the next try; undefined if there is none. */
export function slowest<T extends { readonly retry_after_ms?: number }>(problems: readonly T[]): T | undefined {
  return [...problems].sort((a, b) => (b.retry_after_ms ?? 0) - (a.retry_after_ms ?? 0))[0];
}

/** Returns whether a value of an answer is a number of milliseconds. */
export function isMs(value: unknown): value is number {
  return Number.isSafeInteger(value) && (value as number) >= 0;
}
