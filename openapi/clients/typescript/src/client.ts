import { now, reached } from "./clock.js";
import { LockHeldError, RefusedError, SetupError, UnavailableError } from "./errors.js";
import {
  ALL_TRIES,
  type Answer,
  Gateways,
  isRefusal,
  isUnreachable,
  type Limits,
  ONE_TRY,
  pathOf,
  type Route,
  type Try,
} from "./gateways.js";
import type { components } from "./generated/openapi.js";
import { Guard, release } from "./guard.js";
import { deadlineOf, type Granted, granted } from "./lease.js";
import { defaultOwner, Place, type Waiting } from "./place.js";
import { Streamed } from "./stream.js";
import { LockSet, Single, type Target } from "./target.js";
import { Together } from "./together.js";

/**
 * A longer wait is split into several requests: many proxies end a request that is silent for half
 * a minute.
 */
const LONGEST_TURN = 20_000;
const SHORTEST_TURN = 100;
/** The first request of a wait is short, so that the place in line is soon known. */
const FIRST_TURN = 1_000;
/** The end of a timeout in which no answer waits any more: a tenth of it, and at most this. */
const LAST_ANSWER = 500;
/** The same with several gateways, so that a hanging one cannot use up the time. */
const TURN_OF_SEVERAL = 5_000;
/** For one request, in addition to its wait. */
const ONE_GRANT = 5_000;
/** How long to ask for a lock that no gateway decides about, also without a wait. */
const UNDECIDED = 5_000;
/** The margin at the end of a lease, for work to stop, is a tenth of the TTL, and at most this. */
const LONGEST_MARGIN = 2_000;

/** A lock as a majority of the masters sees it, without its token. */
export type LockStatus = components["schemas"]["LockStatus"];
/** A page of held locks. */
export type LockList = components["schemas"]["LockList"];

/** The gateways, and the API key. */
export interface ClientOptions {
  /**
   * One gateway, or several over the same masters. A path is kept:
   * `https://example.com/locks-of-team-a`.
   */
  readonly url: string | readonly string[];
  /** The API key. */
  readonly key?: string | undefined;
  /**
   * The longest wait of one request, in milliseconds: by default 20 s, or 5 s with several
   * gateways. A longer wait is split into several requests. Set it below the gateway's maximum (25
   * s) and below the limit of a proxy in front.
   */
  readonly maxTurnMs?: number | undefined;
  /**
   * Called for every loss, for every lock that could not be released, and for every lost place in
   * line; for a log. Its exceptions are ignored. It must not block, because a blocked event loop
   * extends no lock.
   */
  readonly warn?: ((message: string, error: Error) => void) | undefined;
}

/** How to acquire a lock. */
export interface LockOptions {
  /**
   * How long the lock outlives its holder, in milliseconds: by default 30000. The guard extends it
   * long before.
   */
  readonly ttlMs?: number | undefined;
  /**
   * How long to wait for the lock while somebody else holds it, in milliseconds; `Infinity` is
   * allowed. By default 0: `lock` rejects at once.
   */
  readonly waitMs?: number | undefined;
  /**
   * The longest time of the whole acquisition in milliseconds, with its wait, and with tries at
   * gateways that do not answer. By default `waitMs` and the time of several tries.
   */
  readonly timeoutMs?: number | undefined;
  /**
   * Called while the acquisition waits, with the place in line and the holder: after a second, and
   * then after each request. Its exceptions are ignored, and it must not block.
   */
  readonly onWaiting?: ((waiting: Waiting) => void) | undefined;
  /**
   * A label for people, shown to anybody who asks for the holder. By default `user@host:pid
   * program`, and none in a browser; an empty text sends none.
   */
  readonly owner?: string | undefined;
  /**
   * How long nobody else gets the lock, in milliseconds from its grant, even if the guard releases
   * it earlier. So a job runs once although the clocks of its hosts
   * differ. At most the longest TTL of the gateway.
   */
  readonly atLeastMs?: number | undefined;
  /** How early the request is served while it waits: 0 to 9, and 9 is served first. By default 5. */
  readonly priority?: number | undefined;
  /**
   * Which requests for the lock wait at the same time: by default all. With `newest`,
   * a newer request of this kind ends the wait with a `RefusedError` whose code is `superseded`.
   */
  readonly queue?: "all" | "newest" | undefined;
  /**
   * How many may hold the lock at once: 1 to 256, for example the size of a pool. Everybody should
   * give the same number, because the largest one in use is the bound. Without it the lock has one
   * holder.
   */
  readonly slots?: number | undefined;
  /** How many of the `slots` this acquisition takes, all or none: by default 1. */
  readonly take?: number | undefined;
  /**
   * How the lock is extended. By default the guard sends requests. With `stream` the guard keeps a
   * stream of events open, and the gateway extends the lock. This needs no timer of the guard, and a
   * browser delays the timers of a page in the background. The TTL must be at least 1 s. In Node.js
   * the stream keeps the process running.
   */
  readonly extendBy?: "requests" | "stream" | undefined;
  /** Stored beside the lock, for people. */
  readonly metadata?: Readonly<Record<string, string>> | undefined;
  /**
   * How long before its deadline a lock that could not be extended counts as lost, in milliseconds.
   * Set it to the time that your work needs to stop, less than half of the TTL. By default a tenth
   * of the TTL, at most 2000.
   */
  readonly marginMs?: number | undefined;
  /**
   * Ends the wait: the request leaves the queue, and the signal's reason is thrown. A held lock is
   * not affected.
   */
  readonly signal?: AbortSignal | undefined;
}

/** How to acquire a set of locks: the options that a set has in common with a single lock. */
export type SetOptions = Omit<LockOptions, "queue" | "slots" | "take" | "extendBy">;

/**
 * The work under a lock. `signal` is aborted when the lock is lost; its reason is a
 * `LockLostError`.
 */
export type Work<T> = (signal: AbortSignal, guard: Guard) => T | PromiseLike<T>;

/** A client of one or several gateways over the same masters. */
export class Client {
  readonly #gateways: Gateways;
  readonly #together: Together;
  readonly #longestTurn: number;
  readonly #warn: ClientOptions["warn"];

  /**
   * Connects to nothing yet.
   *
   * @throws {SetupError} with the value, if an option cannot work.
   */
  constructor(options: ClientOptions | string) {
    const given: ClientOptions = typeof options === "string" ? { url: options } : options;
    checkNames(given, CLIENT_OPTIONS);
    const { url, key, maxTurnMs, warn } = given;
    this.#gateways = new Gateways(typeof url === "string" ? [url] : url, key);
    this.#together = new Together(this.#gateways);
    const longest = this.#gateways.count > 1 ? TURN_OF_SEVERAL : LONGEST_TURN;
    this.#longestTurn = milliseconds("maxTurnMs", maxTurnMs ?? longest, SHORTEST_TURN);
    this.#warn = warn;
  }

  /**
   * Acquires a lock, and keeps it until the guard is released.
   *
   * @throws {LockHeldError} if somebody else held the lock until the wait ended.
   * @throws {RefusedError} that says what is allowed.
   * @throws {UnavailableError} if no gateway decided.
   * @throws {SetupError} if an option cannot work.
   */
  async lock(name: string, options: LockOptions = {}): Promise<Guard> {
    checkNames(options, LOCK_OPTIONS, name);
    const { extendBy = "requests" } = options;
    if (extendBy !== "requests" && extendBy !== "stream") {
      throw new SetupError(`extendBy is ${JSON.stringify(extendBy)}; it has to be "requests" or "stream"`, name);
    }
    const Kind = extendBy === "stream" ? Streamed : Single;
    return this.#lock(new Kind(this.#gateways, name, slotsOf(options)), options);
  }

  /**
   * Acquires 1 to 32 locks, all together or none of them, and keeps them until the guard is
   * released. It holds none of them while it waits, so sets that overlap cannot deadlock, in any
   * order of names. The guard has one token and one fencing token for all locks.
   *
   * @throws the errors of {@link Client.lock}. A {@link LockHeldError} has the held lock in `held`.
   */
  async locks(names: readonly string[], options: SetOptions = {}): Promise<Guard> {
    const target = new LockSet(this.#gateways, names);
    checkNames(options, SET_OPTIONS, target.label);
    return this.#lock(target, options);
  }

  async #lock(target: Target, options: LockOptions): Promise<Guard> {
    const name = target.label;
    const ttl = milliseconds("ttlMs", options.ttlMs ?? 30_000, 1, name);
    const wait = options.waitMs === Infinity ? Infinity : milliseconds("waitMs", options.waitMs ?? 0, 0, name);
    const { timeoutMs } = options;
    const timeout = timeoutMs === undefined ? Infinity : milliseconds("timeoutMs", timeoutMs, 1, name);
    const least = Math.floor(Math.min(ttl / 10, LONGEST_MARGIN));
    const margin = milliseconds("marginMs", options.marginMs ?? least, 0, name);
    if (margin >= ttl / 2) {
      throw new SetupError(`marginMs is ${margin}; it has to be less than half of ttlMs, which is ${ttl}`, name);
    }
    const { lease, sent, deadline } = await this.#acquired(target, ttl, wait, timeout, options);
    if (options.signal?.aborted) {
      target.end();
      void release(this.#gateways, target, { "Lock-Token": lease.token }, deadline).catch(() => {});
      throw options.signal.reason;
    }
    const [gateways, together, warn] = [this.#gateways, this.#together, this.#warn];
    return new Guard({ gateways, together, target, lease, sent, deadline, ttl, margin, warn });
  }

  /**
   * Does the work under a lock, and releases the lock. Work stops only if it observes its signal;
   * `withLock` waits for its end in any case. If the work ended after a loss, the loss is thrown
   * instead of the result, with an error of the work as the cause.
   *
   * @throws {LockLostError} if the lock was lost before the work ended.
   * @throws the errors of {@link Client.lock} and of the work.
   */
  async withLock<T>(name: string, work: Work<T>): Promise<T>;
  async withLock<T>(name: string, options: LockOptions, work: Work<T>): Promise<T>;
  async withLock<T>(name: string, ...rest: [Work<T>] | [LockOptions, Work<T>]): Promise<T> {
    const [options, work] = rest.length === 1 ? [{}, rest[0]] : rest;
    return during(await this.lock(name, options), work);
  }

  /** Does the work under a set of locks: {@link Client.withLock} with the locks of {@link Client.locks}. */
  async withLocks<T>(names: readonly string[], work: Work<T>): Promise<T>;
  async withLocks<T>(names: readonly string[], options: SetOptions, work: Work<T>): Promise<T>;
  async withLocks<T>(names: readonly string[], ...rest: [Work<T>] | [SetOptions, Work<T>]): Promise<T> {
    const [options, work] = rest.length === 1 ? [{}, rest[0]] : rest;
    return during(await this.locks(names, options), work);
  }

  /**
   * Returns the state of a lock on the masters. For people: it may be outdated on arrival.
   *
   * @throws {RefusedError}
   * @throws {UnavailableError}
   */
  async status(name: string): Promise<LockStatus> {
    const params = { path: pathOf(name) };
    const { api } = this.#gateways;
    return this.#asked((to) => api.GET("/locks/{name}", { ...to, params }), body<LockStatus>, name);
  }

  /**
   * Returns a page of the held locks whose names begin with `prefix`.
   *
   * @throws {RefusedError}
   * @throws {UnavailableError}
   */
  async list(query: { prefix?: string; limit?: number; cursor?: string } = {}): Promise<LockList> {
    const { api } = this.#gateways;
    return this.#asked((to) => api.GET("/locks", { ...to, params: { query } }), body<LockList>);
  }

  /**
   * Takes a lock from its holder. The holder's guard reports the loss at the next extension. Of a
   * lock with slots it takes `slot`, by default 1. A holder of several slots loses the lock with any
   * of them.
   *
   * @throws {RefusedError} with status 404 if nobody holds the lock.
   * @throws {UnavailableError}
   */
  async forceRelease(name: string, { slot }: { slot?: number | undefined } = {}): Promise<void> {
    const params = { path: pathOf(name), query: { force: true, ...(slot !== undefined && { slot }) } };
    const { api } = this.#gateways;
    await this.#asked(
      (to) => api.DELETE("/locks/{name}", { ...to, params }),
      () => {},
      name,
    );
  }

  async #asked<T>(send: (to: Try) => Promise<Answer>, read: (data: unknown) => T, lock?: string): Promise<T> {
    const limits: Limits = { until: now() + ALL_TRIES, oneTry: ONE_TRY, lock, hope: now() };
    return (await this.#gateways.ask(send, read, limits)).answer;
  }

  async #acquired(
    target: Target,
    ttl: number,
    wait: number,
    timeout: number,
    options: LockOptions,
  ): Promise<{ lease: Granted; sent: number; deadline: number }> {
    // All repetitions use the same key, so each answer is about the same grant, and all turns of a
    // wait have the same place in line.
    const key = globalThis.crypto.randomUUID();
    const route = this.#gateways.route();
    const posts = new Posts();
    const place = new Place(target.label, { onWaiting: options.onWaiting, warn: this.#warn });
    const end = now() + timeout;
    const patience = Math.min(wait, timeout - Math.min(timeout / 10, LAST_ANSWER));
    try {
      return await this.#granted(target, key, route, posts, place, ttl, patience, end, options);
    } catch (error) {
      target.end();
      if (posts.mayBeGranted || place.isKept) {
        // The lock may have been granted, and nobody has the token. That holds after lock_held too:
        // a gateway that still works on an unanswered POST may grant the lock when its holder
        // releases it. The release is safe, because it takes only grants of this key. It also gives
        // up a place in line.
        const header = { "Idempotency-Key": key };
        const released = release(this.#gateways, target, header, now() + ONE_TRY, route).catch(() => {});
        if (posts.mayBeGranted && !options.signal?.aborted && now() < end) {
          await released;
        }
      }
      throw error;
    }
  }

  async #granted(
    target: Target,
    key: string,
    route: Route,
    posts: Posts,
    place: Place,
    ttl: number,
    wait: number,
    end: number,
    options: LockOptions,
  ): Promise<{ lease: Granted; sent: number; deadline: number }> {
    const { owner = defaultOwner(), metadata, atLeastMs, priority, queue, signal } = options;
    const { count } = this.#gateways;
    const lock = target.label;
    const described = {
      ...(owner && { owner }),
      ...(metadata !== undefined && { metadata }),
      ...(atLeastMs !== undefined && { hold_at_least_ms: atLeastMs }),
      ...(priority !== undefined && { priority }),
      ...(queue !== undefined && { queue }),
    };
    let longest = this.#longestTurn;
    let first = FIRST_TURN;
    const hope = now() + wait;
    const giveUp = Math.min(Math.max(now() + UNDECIDED, hope) + (Math.min(longest, wait) + ONE_GRANT) * count, end);
    while (now() < giveUp) {
      const asked = now();
      const turn = Math.max(0, Math.floor(Math.min(hope - asked, longest, first)));
      const limits: Limits = { until: giveUp, oneTry: turn + ONE_GRANT, signal, lock, route, hope };
      const body = { ttl_ms: ttl, wait_ms: turn, ...described };
      try {
        const { answer, sent } = await this.#gateways.ask(
          (to) => posts.send(target.acquire(to, key, body)),
          granted,
          limits,
        );
        const deadline = deadlineOf(answer, sent, ttl);
        if (now() < deadline) {
          return { lease: answer, sent, deadline };
        }
        // The answer took longer than the lock lives. The next request extends the lock, or gets a
        // new grant.
      } catch (error) {
        if (!(error instanceof RefusedError)) {
          throw error;
        }
        if (error.code === "invalid_wait" && longest > SHORTEST_TURN) {
          longest = Math.max(turn / 2, SHORTEST_TURN);
          continue;
        }
        if (error.code !== "lock_held") {
          throw error;
        }
        first = Infinity;
        place.refused(this.#gateways.at(route), error.problem);
        if (now() >= hope) {
          throw new LockHeldError(error.problem, lock);
        }
        place.tell();
        if (now() - asked < turn / 2) {
          // The answer came before the requested wait was over. Pause before the next request.
          await reached(Math.min(now() + (error.retryAfterMs ?? 1_000), hope), signal);
        }
      }
    }
    throw new UnavailableError(["answers took longer than the lock lives"], lock);
  }
}

/** Does the work, and releases the guard. */
async function during<T>(guard: Guard, work: Work<T>): Promise<T> {
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

/** The POSTs of one acquire. */
class Posts {
  #sent = 0;
  #refused = 0;

  /** Whether a POST may have been granted the lock: not every one was refused, or not sent. */
  get mayBeGranted(): boolean {
    return this.#refused < this.#sent;
  }

  async send(post: Promise<Answer>): Promise<Answer> {
    this.#sent++;
    try {
      const answer = await post;
      if (isRefusal(answer)) {
        this.#refused++;
      }
      return answer;
    } catch (error) {
      if (isUnreachable(error)) {
        this.#refused++;
      }
      throw error;
    }
  }
}

const CLIENT_OPTIONS: readonly string[] = ["url", "key", "maxTurnMs", "warn"] satisfies (keyof ClientOptions)[];
const LOCK_OPTIONS: readonly string[] = [
  "ttlMs",
  "waitMs",
  "timeoutMs",
  "onWaiting",
  "owner",
  "metadata",
  "atLeastMs",
  "priority",
  "queue",
  "slots",
  "take",
  "extendBy",
  "marginMs",
  "signal",
] satisfies (keyof LockOptions)[];
const SINGLE_OPTIONS: readonly string[] = ["queue", "slots", "take", "extendBy"];
const SET_OPTIONS = LOCK_OPTIONS.filter((option) => !SINGLE_OPTIONS.includes(option));

function slotsOf({ slots, take }: LockOptions): { slots?: number; take?: number } {
  return { ...(slots !== undefined && { slots }), ...(take !== undefined && { take }) };
}

/** Refuses an unknown option. Ignoring a misspelt `waitMs` would silently mean "do not wait". */
function checkNames(options: object, known: readonly string[], lock?: string): void {
  for (const option of Object.keys(options)) {
    if (known.includes(option)) continue;
    const hint = known.includes(`${option}Ms`)
      ? `times are in milliseconds, so it is ${option}Ms`
      : SINGLE_OPTIONS.includes(option)
        ? "it is for a single lock, not for a set"
        : `known are ${known.join(", ")}`;
    throw new SetupError(`there is no option ${option}: ${hint}`, lock);
  }
}

/** Checks an option. Only whole, finite milliseconds reach the gateway unchanged. */
function milliseconds(option: string, value: number, least: number, lock?: string): number {
  if (!Number.isSafeInteger(value) || value < least) {
    throw new SetupError(`${option} is ${value}; it has to be a whole number of milliseconds, ${least} or more`, lock);
  }
  return value;
}

function body<T>(data: unknown): T {
  if (typeof data !== "object" || data === null) {
    throw new Error("the answer has no body");
  }
  return data as T;
}
