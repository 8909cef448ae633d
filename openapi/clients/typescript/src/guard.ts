import "./dispose.js";

import { now, reached } from "./clock.js";
import { LockLostError, RefusedError, SetupError, UnavailableError } from "./errors.js";
import type { StreamEvent } from "./events.js";
import {
  type Gateways,
  isProblem,
  limitOfATry,
  LONGEST_TRY,
  ONE_TRY,
  type Route,
  SHORTEST_TRY,
  words,
} from "./gateways.js";
import { deadlineOf, type Granted, granted, isLoss } from "./lease.js";
import { later } from "./place.js";
import { Streamed } from "./stream.js";
import type { Credentials, Target } from "./target.js";
import type { Renewed, Together } from "./together.js";

/**
 * How long a release is tried, in milliseconds. Finished work does not wait longer; the lock then
 * ends with its TTL.
 */
const LONGEST_RELEASE = 5_000;
/**
 * The part of the remaining time in which a stream must have its next event. The gateway extends at
 * a third of the TTL. The rest of the time is for another gateway.
 */
const PATIENCE = 2 / 3;
/** The shortest time between two streams, in milliseconds: a proxy may end each one at once. */
const SHORTEST_STREAM = 500;

/** @internal */
export interface Held {
  gateways: Gateways;
  together: Together;
  target: Target;
  lease: Granted;
  sent: number;
  deadline: number;
  ttl: number;
  margin: number;
  warn: ((message: string, error: Error) => void) | undefined;
}

/**
 * A held lock, or a held set of locks, extended in the background, whose loss is reported. The guard
 * extends all locks of a set by one request, and the set is lost with any of them. `await using`
 * releases the guard at the end of the block. A guard does not keep a process alive.
 */
export class Guard implements AsyncDisposable {
  /** The lock's name. For a set it has all names, separated by commas. */
  readonly name: string;
  /** The names of the locks: one, or those of the set. */
  readonly names: readonly string[];
  /**
   * A number larger than that of every earlier grant of this lock. Give it to the resource with
   * every write, and let the resource refuse smaller ones: `UPDATE … SET …, fence = $1 WHERE id =
   * $2 AND fence <= $1`.
   */
  readonly fencingToken: number;
  /**
   * The numbers of the slots that the guard holds, from 1; undefined for a lock without slots. No
   * other holder has these numbers, so they may name what the holder uses, such as a port.
   */
  readonly slotsHeld: readonly number[] | undefined;
  /**
   * Aborted on a loss, at the latest the margin before the deadline. Its reason is the {@link
   * LockLostError}.
   */
  readonly signal: AbortSignal;
  /** Resolves with the loss. It stays pending if the lock is released before. */
  readonly lost: Promise<LockLostError>;

  readonly #held: Held;
  readonly #loss = new AbortController();
  readonly #stop = new AbortController();
  /** When the lease was last confirmed, and its deadline. */
  #confirmed: number;
  #deadline: number;
  #waiters: number | undefined;
  #next = deferred();
  #release: Promise<void> | undefined;
  #wasThrown = false;

  /** @internal */
  constructor(held: Held) {
    this.#held = held;
    this.#confirmed = held.sent;
    this.#deadline = held.deadline;
    this.name = held.target.label;
    this.names = held.target.names;
    this.fencingToken = held.lease.fencingToken;
    this.slotsHeld = held.lease.slotsHeld;
    const signal = (this.signal = this.#loss.signal);
    this.lost = new Promise((resolve) =>
      signal.addEventListener("abort", () => resolve(signal.reason as LockLostError)),
    );
    const { target } = held;
    void (target instanceof Streamed ? this.#followUntilLost(target) : this.#extendUntilLost());
  }

  /** The secret that extends and releases the lock. */
  get token(): string {
    return this.#held.lease.token;
  }

  /**
   * Until when the lock is ours, on the clock of {@link now}, in milliseconds. Each extension moves
   * it.
   */
  get deadline(): number {
    return this.#deadline;
  }

  /** The time to the deadline, in milliseconds; 0 after it. */
  get remainingMs(): number {
    return Math.max(0, this.#deadline - now());
  }

  /**
   * How many waited for the lock at the gateway at the last extension; undefined before it. A
   * holder may release the lock early when somebody waits. Those who wait for any lock of a set
   * count.
   */
  get waiters(): number | undefined {
    return this.#waiters;
  }

  /** The loss; undefined while the lock is not lost. */
  get loss(): LockLostError | undefined {
    return this.signal.aborted ? (this.signal.reason as LockLostError) : undefined;
  }

  /**
   * Throws unless the lock is ours at this moment. Compares the clock too, so it is right after a
   * blocked event loop.
   *
   * @throws {LockLostError} if the lock was lost.
   * @throws {SetupError} if the lock was released.
   */
  check(): void {
    const loss = this.#lossByNow();
    if (loss !== undefined) {
      this.#wasThrown = true;
      throw loss;
    }
    if (this.#release !== undefined) {
      throw new SetupError("it was released before this", this.name);
    }
  }

  /** Resolves with true at the next extension; with false if the lock is lost or released. */
  extended(): Promise<boolean> {
    return this.#next.promise;
  }

  /**
   * Releases the lock, trying for 5 s at most. Throws nothing if the lock was lost before or is no
   * longer held; call {@link Guard.check} before. A second call returns the promise of the first.
   *
   * @throws {UnavailableError} if no gateway confirmed the release: then the lock ends with its
   * TTL.
   * @throws {RefusedError} if the gateway refuses the release.
   */
  release(): Promise<void> {
    if (this.#release === undefined) {
      const isLost = this.#lossByNow() !== undefined;
      this.#stop.abort();
      this.#next.resolve(false);
      this.#release = this.#ask().catch((error: unknown) => {
        this.#warn(`lock ${JSON.stringify(this.name)}: it was not released, and ends with its TTL`, error as Error);
        if (!isLost) {
          throw error;
        }
      });
    }
    return this.#release;
  }

  /**
   * Releases the lock. A release without confirmation is no error, because the work was done while
   * the lock was ours.
   *
   * @throws {LockLostError} if the lock was lost before, unless {@link Guard.check} has thrown the
   * loss already.
   */
  async [Symbol.asyncDispose](): Promise<void> {
    await this.ended();
    if (this.loss !== undefined && !this.#wasThrown) {
      throw this.loss;
    }
  }

  /**
   * Releases after the work has ended, and returns the loss, if any. After a loss the release runs
   * in the background.
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
      this.#lose(LockLostError.unconfirmed(this.name, ["no code ran until the deadline had passed"]));
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
    this.#warn(`lock ${JSON.stringify(this.name)}: the lock was lost`, loss);
  }

  #warn(message: string, error: Error): void {
    const { warn } = this.#held;
    if (warn !== undefined) {
      later(() => warn(message, error));
    }
  }

  async #extendUntilLost(): Promise<void> {
    const { together, target, lease, ttl, margin } = this.#held;
    const { name } = this;
    const { token } = lease;
    const stop = this.#stop.signal;
    while (!stop.aborted) {
      const interval = (this.#deadline - this.#confirmed) / 3;
      const due = this.#confirmed + interval;
      const givenUp = this.#deadline - margin;
      let renewed: Renewed;
      if (target.isJoint) {
        renewed = await together.renew({ name, token, ttl, interval, due, givenUp, stop });
      } else {
        await reached(due, stop, false);
      }
      if (renewed instanceof LockLostError) {
        this.#lose(renewed);
        return;
      }
      if (renewed !== undefined) {
        this.#extend(renewed.sent, renewed.deadline, renewed.waiters);
        continue;
      }
      await this.#confirm(["it was too late to ask"]);
    }
  }

  /** Asks for an extension until a gateway confirms one, or the lock is lost. */
  async #confirm(heard: readonly string[]): Promise<void> {
    const { gateways, target, lease, ttl, margin } = this.#held;
    const { name } = this;
    const givenUp = this.#deadline - margin;
    const stop = this.#stop.signal;
    while (!stop.aborted) {
      const left = givenUp - now();
      if (left < SHORTEST_TRY) {
        this.#lose(LockLostError.unconfirmed(name, heard));
        return;
      }
      const oneTry = limitOfATry(left);
      try {
        const { answer, sent } = await gateways.ask(
          (to) => target.extend(to, lease.token, ttl),
          (data) => target.readExtended(data),
          { until: givenUp, oneTry, signal: stop, lock: name },
        );
        const deadline = Math.min(...answer.map((each) => deadlineOf(each, sent, ttl)));
        const waiters = answer.map((each) => each.waiters).filter((each) => each !== undefined);
        this.#extend(sent, deadline, waiters.length > 0 ? waiters.reduce((a, b) => a + b) : undefined);
        return;
      } catch (error) {
        if (error instanceof RefusedError && isLoss(error.code)) {
          this.#lose(LockLostError.fromProblem(error.lock ?? name, error.problem));
          return;
        }
        // For example an expired key. The lock is ours until its deadline; the cause may be fixed
        // by then.
        heard = error instanceof UnavailableError ? error.heard : [String((error as Error).message)];
        await reached(now() + Math.min((givenUp - now()) / 8, LONGEST_TRY), stop, false);
      }
    }
  }

  /** Follows the stream by which a gateway extends the lock. After its end, begins another one. */
  async #followUntilLost(target: Streamed): Promise<void> {
    const { gateways, margin } = this.#held;
    const stop = this.#stop.signal;
    stop.addEventListener("abort", () => target.end());
    while (!stop.aborted) {
      const patience = now() + (this.#deadline - now()) * PATIENCE;
      let ended: string | undefined;
      try {
        ended = this.#follow(await target.next(Math.min(patience, this.#deadline - margin)), target);
      } catch (error) {
        // A release ends the stream too, and that is no fault of the gateway.
        if (!stop.aborted) gateways.leave(target.gateway);
        ended = words(error);
      }
      if (ended !== undefined && !stop.aborted) {
        target.end();
        const rested = Math.min(target.sent + SHORTEST_STREAM, now() + (this.#deadline - now()) / 8);
        await reached(rested, stop, false);
        await this.#confirm([`${target.gateway}: ${ended}`]);
      }
    }
  }

  /** Applies an event of a stream. Returns a reason if the guard must open another stream. */
  #follow({ type, data }: StreamEvent, target: Streamed): string | undefined {
    const { gateways, ttl } = this.#held;
    if (type === "extended") {
      const lease = granted(data);
      this.#extend(target.sent, deadlineOf(lease, target.sent, ttl), lease.waiters);
    } else if (type === "lost" && isProblem(data)) {
      const { message } = new RefusedError(data);
      this.#lose(
        isLoss(data.code)
          ? LockLostError.fromProblem(this.name, data)
          : LockLostError.unconfirmed(this.name, [`${target.gateway}: ${message}`]),
      );
    } else if (type === "unknown" && isProblem(data)) {
      // The gateway tries again. Another gateway may reach more masters.
      gateways.leave(target.gateway);
      return gateways.count > 1 ? new RefusedError(data).message : undefined;
    } else if (type === "end") {
      const { reason } = (data ?? {}) as { reason?: unknown };
      if (reason !== "time") {
        gateways.leave(target.gateway);
      }
      return `the stream of events has ended: ${String(reason)}`;
    }
    return undefined;
  }

  #extend(sent: number, deadline: number, waiters: number | undefined): void {
    this.#waiters = waiters;
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
    const { gateways, target, lease } = this.#held;
    await release(gateways, target, { "Lock-Token": lease.token }, Math.max(this.#deadline, now() + 1_000));
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
 * Releases a lock or a set. Throws nothing if it is no longer held, because a repeated request may
 * find that the first one has released it.
 *
 * @internal
 */
export async function release(
  gateways: Gateways,
  target: Target,
  header: Credentials,
  until: number,
  route?: Route,
): Promise<void> {
  try {
    await gateways.ask(
      (to) => target.release(to, header),
      (data) => target.readReleased(data),
      { until: Math.min(until, now() + LONGEST_RELEASE), oneTry: ONE_TRY, lock: target.label, route },
    );
  } catch (error) {
    if (!(error instanceof RefusedError && isLoss(error.code))) {
      throw error;
    }
  }
}
