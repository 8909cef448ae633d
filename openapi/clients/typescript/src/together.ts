// Guards of one client renew together: one PATCH /locks extends all leases that are due at about
// the same time.
//
// Each guard enters its lease, and waits here until the lease is due. The first guard whose lease is
// due takes along the others that are due soon. Each guard still watches its own deadline. A lease
// that the joint request did not decide is extended by its guard alone. A set has a request of its
// own, which its guard sends.

import { now, reached } from "./clock.js";
import { LockLostError, type Problem, RefusedError } from "./errors.js";
import { type Gateways, limitOfATry, mayPass, Undecided } from "./gateways.js";
import type { components } from "./generated/openapi.js";
import { deadlineOf, isLoss, isMs, problemOf, resultsOf, slowest } from "./lease.js";

/** Limit of a gateway on the leases of one request. With the longest names that is about 350 kB. */
const MAX_LEASES = 1_000;
/** The part of the interval between two renewals by which a lease may be renewed early. */
const EARLY = 4;
/** The part of the time left that a joint request may take. In the rest, each guard asks alone. */
const SHARE = 2;

type ExtendResult = components["schemas"]["ExtendResult"];

/** A lease that waits for its next extension. Times are moments, or in milliseconds. */
export interface Renewal {
  name: string;
  token: string;
  ttl: number;
  interval: number;
  due: number;
  givenUp: number;
  /** Aborted when the guard is released. */
  stop: AbortSignal;
}

/**
 * When the request was sent, the new deadline and how many wait, or the loss. Undefined if the guard
 * has to ask alone.
 */
export type Renewed = { sent: number; deadline: number; waiters: number | undefined } | LockLostError | undefined;

/** A waiting renewal. */
class Waiting {
  renewed: Renewed;
  readonly #decided = new AbortController();

  constructor(readonly renewal: Renewal) {
    const { stop } = renewal;
    const end = (): void => this.#decided.abort();
    stop.addEventListener("abort", end);
    this.ended.addEventListener("abort", () => stop.removeEventListener("abort", end));
    if (stop.aborted) {
      end();
    }
  }

  /** Aborted when the renewal is decided, or its guard is released. */
  get ended(): AbortSignal {
    return this.#decided.signal;
  }

  decide(renewed: Renewed): void {
    this.renewed = renewed;
    this.#decided.abort();
  }
}

/** The renewals of one client. */
export class Together {
  readonly #gateways: Gateways;
  readonly #waiting = new Set<Waiting>();
  /** A gateway has answered that it does not know PATCH /locks. */
  #isUnknown = false;

  constructor(gateways: Gateways) {
    this.#gateways = gateways;
  }

  /**
   * Waits until a lease is due, and renews it together with others. Resolves with undefined if its
   * guard has to ask alone.
   */
  async renew(renewal: Renewal): Promise<Renewed> {
    const waiting = new Waiting(renewal);
    this.#waiting.add(waiting);
    await reached(renewal.due, waiting.ended, false);
    if (!waiting.ended.aborted) {
      const taken = this.#take(waiting);
      if (taken.length > 1) {
        void this.#extendMany(taken);
      }
      if (taken.length !== 1) {
        // A joint request has the lease: this one, or that of another guard.
        await reached(renewal.givenUp, waiting.ended, false);
      }
    }
    this.#waiting.delete(waiting);
    const { renewed } = waiting;
    // A late answer is of no use any more.
    waiting.decide(undefined);
    return renewed;
  }

  /**
   * Takes a lease out, with the others to renew together with it. Returns none if another request
   * has taken the lease.
   */
  #take(first: Waiting): Waiting[] {
    if (!this.#waiting.delete(first)) {
      return [];
    }
    if (this.#isUnknown) {
      return [first];
    }
    const isSoon = ({ ended, renewal: { ttl, due, interval } }: Waiting): boolean =>
      !ended.aborted && ttl === first.renewal.ttl && due <= now() + interval / EARLY;
    const others = [...this.#waiting]
      .filter(isSoon)
      .sort((a, b) => a.renewal.due - b.renewal.due)
      .slice(0, MAX_LEASES - 1);
    for (const other of others) {
      this.#waiting.delete(other);
    }
    return [first, ...others];
  }

  /** Extends leases by one request, which is repeated for those that are not decided. */
  async #extendMany(leases: readonly Waiting[]): Promise<void> {
    const left = Math.min(...leases.map(({ renewal }) => renewal.givenUp)) - now();
    const { ttl } = leases[0]!.renewal;
    const allEnded = new AbortController();
    let count = leases.length;
    for (const { ended } of leases) {
      ended.addEventListener("abort", () => {
        count--;
        if (count === 0) {
          allEnded.abort();
        }
      });
    }
    let asked: readonly Waiting[] = [];
    let sent = 0;
    try {
      await this.#gateways.ask(
        (to) => {
          asked = leases.filter(({ ended }) => !ended.aborted);
          const refs = asked.map(({ renewal: { name, token } }) => ({ name, token }));
          sent = now();
          return this.#gateways.api.PATCH("/locks", { ...to, body: { leases: refs, ttl_ms: ttl } });
        },
        (data) => {
          const failed: Problem[] = [];
          resultsOf<ExtendResult>(data, asked.length).forEach((result, at) => {
            const lease = asked[at]!;
            const problem = decide(lease, result, sent);
            if (problem !== undefined) {
              failed.push(problem);
            }
          });
          const problem = slowest(failed);
          if (problem !== undefined) {
            throw new Undecided(problem);
          }
        },
        { until: now() + left / SHARE, oneTry: limitOfATry(left), signal: allEnded.signal },
      );
    } catch (error) {
      if (error instanceof RefusedError && [404, 405].includes(error.status)) {
        this.#isUnknown = true;
      }
    }
    for (const lease of leases.filter(({ ended }) => !ended.aborted)) {
      lease.decide(undefined);
    }
  }
}

/** Applies the result for one lease. Returns the problem if the lease has to be sent again. */
function decide(lease: Waiting, result: ExtendResult, sent: number): Problem | undefined {
  const { name, status, code = "", validity_ms, waiters, elapsed_ms } = result;
  const { renewal } = lease;
  const problem = problemOf(result);
  const isKnown = name === renewal.name;
  if (isKnown && status === 200 && isMs(validity_ms) && isMs(elapsed_ms)) {
    const granted = { validity: validity_ms, elapsed: elapsed_ms };
    lease.decide({ sent, deadline: deadlineOf(granted, sent, renewal.ttl), waiters });
  } else if (isKnown && isLoss(code)) {
    lease.decide(LockLostError.fromProblem(name, problem));
  } else if (isKnown && mayPass(status)) {
    return problem;
  } else {
    lease.decide(undefined);
  }
  return undefined;
}
