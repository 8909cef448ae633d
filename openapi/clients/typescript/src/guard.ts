import "./dispose.js";

import { now, reached } from "./clock.js";
import { LockLostError, RefusedError, SetupError, UnavailableError } from "./errors.js";
import { type Gateways, ONE_TRY, pathOf, SHORTEST_TRY } from "./gateways.js";
import { deadlineOf, type Granted, granted } from "./lease.js";

/** For one try to extend: a share of what is left, so that a hung gateway cannot eat the lease, and no more than this. */
const LONGEST_TRY = 5_000;
const SHARE_OF_A_TRY = 4;

/** For how long a release is tried, in milliseconds: work that is done is not held up for longer. The TTL does the rest. */
const LONGEST_RELEASE = 5_000;

/** What a gateway says when a token holds its lock no more. The page of a proxy has a status too. */
const LOSSES: readonly string[] = ["lock_not_found", "not_holder", "max_hold_reached"];

/** @internal */
export interface Held {
  gateways: Gateways;
  name: string;
  lease: Granted;
  sent: number;
  deadline: number;
  ttl: number;
  margin: number;
  warn: ((message: string, error: Error) => void) | undefined;
}

/**
 * A lock that is held: extended in the background, and lost out loud. `await using` releases it at the end of the block.
 * It does not keep a process alive that has nothing else to do.
 */
export class Guard implements AsyncDisposable {
  /** The lock's name. */
  readonly name: string;
  /**
   * Larger than that of every earlier grant of this lock. Give it to the resource with every write, and let the resource
   * refuse smaller ones: `UPDATE … SET …, fence = $1 WHERE id = $2 AND fence <= $1`.
   */
  readonly fencingToken: number;
  /** Aborted when the lock is lost, at the latest the margin before its deadline. Its reason is the {@link LockLostError}. */
  readonly signal: AbortSignal;
  /** Resolves when the lock is lost, with why. It stays open when the lock is released before. */
  readonly lost: Promise<LockLostError>;

  readonly #held: Held;
  readonly #loss = new AbortController();
  readonly #stop = new AbortController();
  /** When it was last confirmed, and until when that counts. */
  #confirmed: number;
  #deadline: number;
  #next = deferred();
  #release: Promise<void> | undefined;
  #wasThrown = false;

  /** @internal */
  constructor(held: Held) {
    this.#held = held;
    this.#confirmed = held.sent;
    this.#deadline = held.deadline;
    this.name = held.name;
    this.fencingToken = held.lease.fencingToken;
    const signal = (this.signal = this.#loss.signal);
    this.lost = new Promise((resolve) =>
      signal.addEventListener("abort", () => resolve(signal.reason as LockLostError)),
    );
    void this.#extendUntilLost();
  }

  /** The secret by which the lock is extended and released. */
  get token(): string {
    return this.#held.lease.token;
  }

  /** Until when the lock is certainly ours, on the clock of {@link now}, in milliseconds. It moves on with each extension. */
  get deadline(): number {
    return this.#deadline;
  }

  /** How long until the deadline, in milliseconds; 0 when it has passed. */
  get remainingMs(): number {
    return Math.max(0, this.#deadline - now());
  }

  /** Why the lock was lost; undefined while it is not. */
  get loss(): LockLostError | undefined {
    return this.signal.aborted ? (this.signal.reason as LockLostError) : undefined;
  }

  /**
   * Whether the lock is certainly ours at this moment, by the clock too: also where nothing has run for a while.
   *
   * @throws {LockLostError} when it was lost.
   * @throws {SetupError} when it was released.
   */
  check(): void {
    const loss = this.#lossByNow();
    if (loss !== undefined) {
      this.#wasThrown = true;
      throw loss;
    }
    if (this.#release !== undefined) {
      throw new SetupError(`the lock ${JSON.stringify(this.name)} was released before this`);
    }
  }

  /** Resolves at the next extension with true; with false when there is none any more: the lock was lost or released. */
  extended(): Promise<boolean> {
    return this.#next.promise;
  }

  /**
   * Releases the lock, and tries for 5 s at most. Quiet when it was lost before or is not held any more; ask
   * {@link Guard.check} before. The second call is the same as the first.
   *
   * @throws {UnavailableError} when no gateway has confirmed it: then the lock ends with its TTL.
   * @throws {RefusedError} when the gateway refuses it.
   */
  release(): Promise<void> {
    if (this.#release === undefined) {
      const isLost = this.#lossByNow() !== undefined;
      this.#stop.abort();
      this.#next.resolve(false);
      this.#release = this.#ask().catch((error: unknown) => {
        this.#warn(`the lock ${JSON.stringify(this.name)} was not released, and ends with its TTL`, error as Error);
        if (!isLost) {
          throw error;
        }
      });
    }
    return this.#release;
  }

  /**
   * Releases the lock, without a word when no gateway confirms that: the work was done while it was ours.
   *
   * @throws {LockLostError} when it was lost before, unless {@link Guard.check} has thrown that already.
   */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.ended();
    if (this.loss !== undefined && !this.#wasThrown) {
      throw this.loss;
    }
  }

  /**
   * The work is over: releases, and says whether it was over too late. A release that nobody waits for is made in the background.
   *
   * @internal
   */
  async ended(): Promise<LockLostError | undefined> {
    const released = this.release().catch(() => {});
    if (this.loss === undefined) {
      await released;
    }
    return this.loss;
  }

  #lossByNow(): LockLostError | undefined {
    if (this.loss === undefined && this.#release === undefined && now() >= this.#deadline) {
      this.#lose(LockLostError.unconfirmed(this.name, ["nothing has run since"]));
    }
    return this.loss;
  }

  #lose(loss: LockLostError): void {
    if (this.#loss.signal.aborted || this.#release !== undefined) {
      return;
    }
    this.#stop.abort();
    this.#next.resolve(false);
    this.#loss.abort(loss);
    this.#warn("a lock was lost", loss);
  }

  /** After all else is told. What a log throws, now or later, must not end what called it. */
  #warn(message: string, error: Error): void {
    void new Promise<unknown>((resolve) => resolve(this.#held.warn?.(message, error))).catch(() => {});
  }

  async #extendUntilLost(): Promise<void> {
    const { gateways, name, lease, ttl, margin } = this.#held;
    const stop = this.#stop.signal;
    const params = { path: pathOf(name), header: { "Lock-Token": lease.token } };
    while (!stop.aborted) {
      await reached(this.#confirmed + (this.#deadline - this.#confirmed) / 3, stop, false);
      const givenUp = this.#deadline - margin;
      let heard: readonly string[] = ["it was too late to ask"];
      for (let isConfirmed = false; !isConfirmed && !stop.aborted;) {
        const left = givenUp - now();
        if (left < SHORTEST_TRY) {
          this.#lose(LockLostError.unconfirmed(name, heard));
          return;
        }
        const oneTry = Math.min(Math.max(left / SHARE_OF_A_TRY, SHORTEST_TRY), LONGEST_TRY);
        try {
          const { answer, sent } = await gateways.ask(
            (to) => gateways.api.PATCH("/locks/{name}", { ...to, params, body: { ttl_ms: ttl } }),
            granted,
            { until: givenUp, oneTry, signal: stop },
          );
          this.#extend(sent, deadlineOf(answer, sent, ttl));
          isConfirmed = true;
        } catch (error) {
          if (error instanceof RefusedError && LOSSES.includes(error.code)) {
            this.#lose(LockLostError.told(name, error.problem));
            return;
          }
          // A key that has ended, say. The lock is ours until its deadline, and somebody may mend it.
          heard = error instanceof UnavailableError ? error.heard : [String((error as Error).message)];
          await reached(now() + Math.min((givenUp - now()) / 8, LONGEST_TRY), stop, false);
        }
      }
    }
  }

  #extend(sent: number, deadline: number): void {
    if (this.#stop.signal.aborted) {
      return;
    }
    this.#confirmed = sent;
    this.#deadline = Math.max(deadline, this.#deadline);
    const { resolve } = this.#next;
    this.#next = deferred();
    resolve(true);
  }

  async #ask(): Promise<void> {
    const { gateways, name, lease } = this.#held;
    await release(gateways, name, { "Lock-Token": lease.token }, Math.max(this.#deadline, now() + 1_000));
  }
}

interface Deferred {
  promise: Promise<boolean>;
  resolve: (value: boolean) => void;
}

function deferred(): Deferred {
  let resolve!: Deferred["resolve"];
  const promise = new Promise<boolean>((resolved) => (resolve = resolved));
  return { promise, resolve };
}

/**
 * By the token, or by the key of a request whose answer, with the token, never came. Quiet when it is not held any more: a
 * repetition meets what the first one did.
 *
 * @internal
 */
export async function release(
  gateways: Gateways,
  name: string,
  header: { "Lock-Token": string } | { "Idempotency-Key": string },
  until: number,
): Promise<void> {
  const params = { path: pathOf(name), header };
  try {
    await gateways.ask(
      (to) => gateways.api.DELETE("/locks/{name}", { ...to, params }),
      () => {},
      { until: Math.min(until, now() + LONGEST_RELEASE), oneTry: ONE_TRY },
    );
  } catch (error) {
    if (!(error instanceof RefusedError && LOSSES.includes(error.code))) {
      throw error;
    }
  }
}
