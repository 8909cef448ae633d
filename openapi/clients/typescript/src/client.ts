import { now, reached } from "./clock.js";
import { LockHeldError, RefusedError, SetupError, UnavailableError } from "./errors.js";
import { ALL_TRIES, type Answer, Gateways, type Limits, ONE_TRY, pathOf, type Try } from "./gateways.js";
import type { components } from "./generated/openapi.js";
import { Guard, release } from "./guard.js";
import { deadlineOf, type Granted, granted } from "./lease.js";

/** A gateway answers a longer wait in turns: proxies in front end a request that is silent for half a minute. */
const LONGEST_TURN = 20_000;
const SHORTEST_TURN = 100;
/** Where there are several gateways: one that hangs must not have all the time. */
const TURN_OF_SEVERAL = 5_000;
/** Beside its wait, for one request. */
const ONE_GRANT = 5_000;
/** For how long a lock is asked for that nobody decides on, also without a wait. */
const UNDECIDED = 5_000;
/** The end of a lease that is left for whoever has to stop: a tenth of the TTL, and no more than this. */
const LONGEST_MARGIN = 2_000;

/** A lock as a majority of the nodes sees it, without its token. */
export type LockStatus = components["schemas"]["LockStatus"];
/** A page of held locks. */
export type LockList = components["schemas"]["LockList"];

/** Where the gateways are, and how to be known there. */
export interface ClientOptions {
  /** One gateway, or several over the same masters. A path is kept: `https://example.com/locks-of-team-a`. */
  readonly url: string | readonly string[];
  /** The API key. */
  readonly key?: string | undefined;
  /**
   * The longest wait that is asked of a gateway in one request, in milliseconds: 20 s, or 5 s where there are several. A longer
   * wait is asked for in turns. Less than the gateway's maximum (25 s), and than what a proxy in front allows.
   */
  readonly maxTurnMs?: number | undefined;
  /** Told of every loss, and of every lock that could not be released; for a log. What it throws is ignored. */
  readonly warn?: ((message: string, error: Error) => void) | undefined;
}

/** A lock to be acquired, and how. */
export interface LockOptions {
  /** For how long the lock outlives its holder, in milliseconds: 30000 unless this says otherwise. It is extended long before. */
  readonly ttlMs?: number | undefined;
  /**
   * How long to wait for it while somebody else holds it, in milliseconds; `Infinity` is allowed. 0 by default: whoever is refused
   * is told at once.
   */
  readonly waitMs?: number | undefined;
  /** A label for people: shown to whoever asks who holds the lock. */
  readonly owner?: string | undefined;
  /** Stored beside the lock, for people. */
  readonly metadata?: Readonly<Record<string, string>> | undefined;
  /**
   * How long before its deadline a lock that could not be extended is given up for lost, in milliseconds: a tenth of the TTL by
   * default, 2000 at most; less than half the TTL. As long as work takes to stop.
   */
  readonly marginMs?: number | undefined;
  /** Ends the wait: the queue is left, and the signal's reason is thrown. It does nothing to a lock that is held. */
  readonly signal?: AbortSignal | undefined;
}

/** What is done under a lock. `signal` is aborted when the lock is lost; its reason is a `LockLostError`. */
export type Work<T> = (signal: AbortSignal, guard: Guard) => T | PromiseLike<T>;

/** A service of one or several gateways over the same masters. */
export class Client {
  readonly #gateways: Gateways;
  readonly #longestTurn: number;
  readonly #warn: ClientOptions["warn"];

  /**
   * Nothing is connected yet.
   *
   * @throws {SetupError} with the value, when something of it cannot work.
   */
  constructor(options: ClientOptions | string) {
    const { url, key, maxTurnMs, warn } = typeof options === "string" ? { url: options } : options;
    this.#gateways = new Gateways(typeof url === "string" ? [url] : url, key);
    const longest = this.#gateways.count > 1 ? TURN_OF_SEVERAL : LONGEST_TURN;
    this.#longestTurn = milliseconds("maxTurnMs", maxTurnMs ?? longest, SHORTEST_TURN);
    this.#warn = warn;
  }

  /**
   * Acquires a lock, and keeps it until the guard is released.
   *
   * @throws {LockHeldError} when somebody else had it until the wait ended.
   * @throws {RefusedError} with what is allowed.
   * @throws {UnavailableError} when no gateway decided.
   * @throws {SetupError} when an option cannot work.
   */
  async lock(name: string, options: LockOptions = {}): Promise<Guard> {
    const ttl = milliseconds("ttlMs", options.ttlMs ?? 30_000, 1);
    const wait = options.waitMs === Infinity ? Infinity : milliseconds("waitMs", options.waitMs ?? 0, 0);
    const margin = milliseconds("marginMs", options.marginMs ?? Math.floor(Math.min(ttl / 10, LONGEST_MARGIN)), 0);
    if (margin >= ttl / 2) {
      throw new SetupError(`marginMs is ${margin}; it has to be less than half of ttlMs, which is ${ttl}`);
    }
    const { lease, sent, deadline } = await this.#acquired(name, ttl, wait, options);
    if (options.signal?.aborted) {
      void release(this.#gateways, name, { "Lock-Token": lease.token }, deadline).catch(() => {});
      throw options.signal.reason;
    }
    return new Guard({ gateways: this.#gateways, name, lease, sent, deadline, ttl, margin, warn: this.#warn });
  }

  /**
   * Does the work under a lock, and releases it. The work has to look at its signal to be stopped; it is waited for in any case.
   * When it ended after the loss that is what is thrown, whatever it returned, and with whatever it threw as the cause.
   *
   * @throws {LockLostError} when the lock was lost before the work ended.
   * @throws as {@link Client.lock}, and what the work throws.
   */
  async withLock<T>(name: string, work: Work<T>): Promise<T>;
  async withLock<T>(name: string, options: LockOptions, work: Work<T>): Promise<T>;
  async withLock<T>(name: string, ...rest: [Work<T>] | [LockOptions, Work<T>]): Promise<T> {
    const [options, work] = rest.length === 1 ? [{}, rest[0]] : rest;
    const guard = await this.lock(name, options);
    let value: T;
    try {
      value = await work(guard.signal, guard);
    } catch (error) {
      throw (await guard.ended())?.because(error) ?? error;
    }
    const loss = await guard.ended();
    if (loss !== undefined) {
      throw loss;
    }
    return value;
  }

  /**
   * What the nodes know of a lock. For people: it may be outdated on arrival.
   *
   * @throws {RefusedError}
   * @throws {UnavailableError}
   */
  async status(name: string): Promise<LockStatus> {
    const params = { path: pathOf(name) };
    const { api } = this.#gateways;
    return this.#asked((to) => api.GET("/locks/{name}", { ...to, params }), body<LockStatus>);
  }

  /**
   * A page of the held locks whose names begin so.
   *
   * @throws {RefusedError}
   * @throws {UnavailableError}
   */
  async list(query: { prefix?: string; limit?: number; cursor?: string } = {}): Promise<LockList> {
    const { api } = this.#gateways;
    return this.#asked((to) => api.GET("/locks", { ...to, params: { query } }), body<LockList>);
  }

  /**
   * Takes a lock from whoever holds it, who is told at the next extension.
   *
   * @throws {RefusedError} with status 404 when nobody holds it.
   * @throws {UnavailableError}
   */
  async forceRelease(name: string): Promise<void> {
    const params = { path: pathOf(name), query: { force: true } };
    const { api } = this.#gateways;
    await this.#asked(
      (to) => api.DELETE("/locks/{name}", { ...to, params }),
      () => {},
    );
  }

  async #asked<T>(send: (to: Try) => Promise<Answer>, read: (data: unknown) => T): Promise<T> {
    return (await this.#gateways.ask(send, read, { until: now() + ALL_TRIES, oneTry: ONE_TRY })).answer;
  }

  async #acquired(
    name: string,
    ttl: number,
    wait: number,
    options: LockOptions,
  ): Promise<{ lease: Granted; sent: number; deadline: number }> {
    // The same for all repetitions: whichever is answered tells of the same grant.
    const header = { "Idempotency-Key": globalThis.crypto.randomUUID() };
    const params = { path: pathOf(name), header };
    try {
      return await this.#granted(params, ttl, wait, options);
    } catch (error) {
      if (!(error instanceof RefusedError)) {
        // It may have been granted, and nobody has the token.
        const released = release(this.#gateways, name, header, now() + ONE_TRY).catch(() => {});
        if (!options.signal?.aborted) {
          await released;
        }
      }
      throw error;
    }
  }

  async #granted(
    params: { path: { name: string }; header: { "Idempotency-Key": string } },
    ttl: number,
    wait: number,
    { owner, metadata, signal }: LockOptions,
  ): Promise<{ lease: Granted; sent: number; deadline: number }> {
    const { api, count } = this.#gateways;
    const described = { ...(owner !== undefined && { owner }), ...(metadata !== undefined && { metadata }) };
    let longest = this.#longestTurn;
    const endOfWait = now() + wait;
    const giveUp = Math.max(now() + UNDECIDED, endOfWait) + (Math.min(longest, wait) + ONE_GRANT) * count;
    while (now() < giveUp) {
      const asked = now();
      const turn = Math.max(0, Math.floor(Math.min(endOfWait - asked, longest)));
      const limits: Limits = { until: giveUp, oneTry: turn + ONE_GRANT, signal };
      const body = { ttl_ms: ttl, wait_ms: turn, ...described };
      try {
        const { answer, sent } = await this.#gateways.ask(
          (to) => api.POST("/locks/{name}", { ...to, params, body }),
          granted,
          limits,
        );
        const deadline = deadlineOf(answer, sent, ttl);
        if (now() < deadline) {
          return { lease: answer, sent, deadline };
        }
        // The answer was on its way for longer than the lock lives. Asked again, it is extended or granted anew.
      } catch (error) {
        if (!(error instanceof RefusedError)) {
          throw error;
        }
        if (error.code === "invalid_wait" && longest > SHORTEST_TURN) {
          longest = Math.max(turn / 2, SHORTEST_TURN);
        } else if (error.code !== "lock_held") {
          throw error;
        } else if (now() >= endOfWait) {
          throw new LockHeldError(error.problem);
        } else if (now() - asked < turn / 2) {
          // Answered before its turn was over: not to be asked again at once.
          await reached(Math.min(now() + (error.retryAfterMs ?? 1_000), endOfWait), signal);
        }
      }
    }
    throw new UnavailableError(["answers took longer than the lock lives"]);
  }
}

/** Whole and finite, so that what is asked for is what is counted with. */
function milliseconds(option: string, value: number, least: number): number {
  if (!Number.isSafeInteger(value) || value < least) {
    throw new SetupError(`${option} is ${value}; it has to be a whole number of milliseconds, ${least} or more`);
  }
  return value;
}

function body<T>(data: unknown): T {
  if (typeof data !== "object" || data === null) {
    throw new Error("there is no answer in it");
  }
  return data as T;
}
