// What a client needs to know of a granted or extended lock.

import { now } from "./clock.js";

export interface Granted {
  token: string;
  fencingToken: number;
  validity: number;
  elapsed: number;
}

/** Throws when it is no lease: a deadline counted from something else would never come. */
export function granted(data: unknown): Granted {
  const { token, fencing_token, validity_ms, elapsed_ms } = (data ?? {}) as Record<string, unknown>;
  if (typeof token !== "string" || !/^[A-Za-z0-9.]+$/.test(token)) {
    throw new Error("there is no token in it");
  }
  const lease = { token, fencingToken: fencing_token, validity: validity_ms, elapsed: elapsed_ms };
  for (const number of [lease.fencingToken, lease.validity, lease.elapsed]) {
    if (!Number.isSafeInteger(number) || (number as number) < 0) {
      throw new Error("there is no lease in it");
    }
  }
  return lease as Granted;
}

/**
 * Until when it may be trusted, if it was asked for then for so long. What was on the way is lost, what was spent in the
 * gateway is not: its validity was counted afterwards. No answer is believed that says more than can be.
 */
export function deadlineOf({ elapsed, validity }: Granted, sent: number, ttl: number): number {
  return sent + Math.min(elapsed, now() - sent) + Math.min(validity, ttl);
}
