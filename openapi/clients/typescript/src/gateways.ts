// Asks one of several gateways until one answers.

import createClient, { type Client as Api } from "openapi-fetch";

import { now, overdue, reached } from "./clock.js";
import { type Problem, RefusedError, SetupError, UnavailableError } from "./errors.js";
import type { paths } from "./generated/openapi.js";

/** The first and the longest pause between two rounds over all gateways, in milliseconds. */
const FIRST_PAUSE = 50;
const LONGEST_PAUSE = 2_000;
/**
 * With less time no answer can be expected, and earlier answers say more than a missing one. In
 * milliseconds.
 */
export const SHORTEST_TRY = 50;
/** Limits of requests that no lease waits for, in milliseconds. */
export const ONE_TRY = 2_000;
export const ALL_TRIES = 5_000;

/**
 * One try to extend takes a quarter of the remaining time, so that a hung gateway cannot use up the
 * lease, and at most this, in milliseconds.
 */
export const LONGEST_TRY = 5_000;
const SHARE_OF_A_TRY = 4;

/** The target of one request, and the signal that ends it early. */
export interface Try {
  baseUrl: string;
  signal: AbortSignal;
}

export interface Answer {
  data?: unknown;
  error?: unknown;
  response: Pick<Response, "ok" | "status" | "headers">;
}

/** The gateway that an acquisition asks: it stays there while that gateway answers. */
export interface Route {
  at: number;
}

export interface Limits {
  /** All waiting ends at this moment. */
  until: number;
  /** The limit for one gateway, in milliseconds. */
  oneTry: number;
  /** Ends everything: its reason is thrown. */
  signal?: AbortSignal | undefined;
  /** The lock or set that errors name. */
  lock?: string | undefined;
  /** Keeps several requests at one gateway. */
  route?: Route | undefined;
  /**
   * After this moment no further round is asked if no gateway has accepted a connection so far. By
   * default `until`.
   */
  hope?: number | undefined;
}

/**
 * A failed request: a problem, or an outcome that leaves open whether the request was executed.
 * `lock` is the lock of a set that the problem is about.
 */
type Failure = { problem: Problem; lock?: string | undefined } | { unclear: string; isUnreachable?: boolean };

/**
 * Thrown by the reader of an answer to a request about several locks that has failed for some of
 * them. The problem counts as the answer to the request. `lock` is the lock that the problem is
 * about, if the locks belong to one guard.
 */
export class Undecided extends Error {
  constructor(
    readonly problem: Problem,
    readonly lock?: string,
  ) {
    super(problem.detail);
  }
}

export class Gateways {
  readonly api: Api<paths>;
  readonly #urls: readonly string[];
  /** The gateway that answered last. */
  #current = 0;

  constructor(urls: readonly string[], key: string | undefined) {
    if (urls.length === 0) {
      throw new SetupError("no URL of a gateway was given, such as http://127.0.0.1:8080");
    }
    this.#urls = urls.map(parsed);
    // A browser sends its own User-Agent. To send another one, it would need a permission by CORS.
    const isBrowser = (globalThis as { process?: { pid?: number } }).process?.pid === undefined;
    const headers: Record<string, string> = isBrowser ? {} : { "user-agent": "redlock-gateway-typescript" };
    if (key !== undefined) {
      headers["authorization"] = `Bearer ${key.trim()}`;
      try {
        new Headers(headers);
      } catch {
        throw new SetupError("the API key has characters that a header cannot contain");
      }
    }
    // A redirect would send the token to another host.
    this.api = createClient<paths>({ headers, redirect: "manual" });
  }

  get count(): number {
    return this.#urls.length;
  }

  /** Returns a route that begins at the gateway that answered last. */
  route(): Route {
    return { at: this.#current };
  }

  /** Returns the URL of the gateway that a route has reached. */
  at({ at }: Route): string {
    return this.#urls[at]!;
  }

  /** If the gateway with this URL is the current one, makes the next gateway the current one. */
  leave(url: string): void {
    if (this.#urls[this.#current] === url) {
      this.#current = (this.#current + 1) % this.#urls.length;
    }
  }

  /**
   * Asks one gateway after the other until one answers, with pauses. Returns the answer, and when
   * its request was sent. A gateway may execute a request twice, so it must be idempotent. `read`
   * throws if an answer is unusable.
   */
  async ask<T>(
    send: (to: Try) => Promise<Answer>,
    read: (data: unknown) => T,
    { until, oneTry, signal, lock, route = this.route(), hope = until }: Limits,
  ): Promise<{ answer: T; sent: number }> {
    let pause = FIRST_PAUSE;
    let isAnybodyThere = false;
    for (;;) {
      const heard: string[] = [];
      let soonest = Infinity;
      for (let asked = 0; asked < this.#urls.length; asked++) {
        signal?.throwIfAborted();
        const { at } = route;
        const baseUrl = this.#urls[at]!;
        const sent = now();
        if (heard.length > 0 && until - sent < SHORTEST_TRY) {
          throw new UnavailableError(heard, lock);
        }
        const result = await attempt(baseUrl, send, read, Math.min(oneTry, until - sent), signal);
        if ("answer" in result) {
          return { answer: result.answer, sent };
        }
        signal?.throwIfAborted();
        isAnybodyThere ||= !("isUnreachable" in result);
        if ("problem" in result) {
          if (!mayPass(result.problem.status)) {
            throw new RefusedError(result.problem, result.lock ?? lock);
          }
          heard.push(new RefusedError(result.problem, result.lock).message);
          soonest = Math.min(soonest, result.problem.retry_after_ms ?? 0);
        } else {
          heard.push(result.unclear);
          soonest = 0;
        }
        route.at = (at + 1) % this.#urls.length;
        // Another request may have moved on to the next gateway meanwhile.
        if (this.#current === at) {
          this.#current = route.at;
        }
      }
      let rest = Math.max(pause * (0.5 + Math.random()), soonest);
      if (!isAnybodyThere) {
        rest = Math.min(rest, hope - now());
      }
      if (rest <= 0 || rest + SHORTEST_TRY >= until - now()) {
        throw new UnavailableError(heard, lock);
      }
      await reached(now() + rest, signal);
      pause = Math.min(pause * 2, LONGEST_PAUSE);
    }
  }
}

/** A name as part of a path. Other characters are encoded, and the gateway checks them. */
export function pathOf(name: string): { name: string } {
  if (name === "" || name === "." || name === "..") {
    throw new SetupError(`${JSON.stringify(name)} is not a name of a lock: it would change the path of the URL`);
  }
  try {
    encodeURIComponent(name);
  } catch {
    throw new SetupError(`${JSON.stringify(name)} is not a name of a lock: it contains half of a character`);
  }
  return { name };
}

function parsed(text: string): string {
  const refused = (why: string): SetupError =>
    // Text before an @ may be a password.
    new SetupError(`${JSON.stringify(text.slice(text.lastIndexOf("@") + 1))} is not a URL of a gateway: ${why}`);
  let url: URL;
  try {
    url = new URL(text);
  } catch {
    throw refused("it has to begin with http:// or https://, and name a host");
  }
  if (url.protocol !== "http:" && url.protocol !== "https:") {
    throw refused("it has to begin with http:// or https://, and name a host");
  }
  if (url.search !== "" || url.hash !== "" || url.username !== "" || url.password !== "") {
    throw refused("only scheme, host, port and path are allowed; use the option key for an API key");
  }
  return url.href.replace(/\/+$/, "");
}

async function attempt<T>(
  url: string,
  send: (to: Try) => Promise<Answer>,
  read: (data: unknown) => T,
  limit: number,
  signal: AbortSignal | undefined,
): Promise<{ answer: T } | Failure> {
  const request = new AbortController();
  const end = (): void => request.abort();
  signal?.addEventListener("abort", end);
  let isLate = false;
  void overdue(now() + limit, request.signal).then(() => {
    isLate ||= !request.signal.aborted;
    end();
  });
  try {
    const { data, error, response } = await send({ baseUrl: url, signal: request.signal });
    if (!response.ok) {
      return failure(url, response, error);
    }
    try {
      return { answer: read(data) };
    } catch (unreadable) {
      if (unreadable instanceof Undecided) {
        return { problem: unreadable.problem, lock: unreadable.lock };
      }
      return { unclear: `${url} answered ${response.status}: ${words(unreadable)}` };
    }
  } catch (thrown) {
    if (isLate) {
      return { unclear: `${url} did not answer within ${(limit / 1000).toFixed(1)} s` };
    }
    return { unclear: `${url}: ${words(thrown)}`, ...(isUnreachable(thrown) && { isUnreachable: true }) };
  } finally {
    // This ends the timer too.
    end();
    signal?.removeEventListener("abort", end);
  }
}

/** Codes of Node.js for a connection that did not come about. */
const UNREACHABLE: readonly unknown[] = [
  "ECONNREFUSED",
  "EHOSTUNREACH",
  "ENETUNREACH",
  "ENOTFOUND",
  "EAI_AGAIN",
  "UND_ERR_CONNECT_TIMEOUT",
];

/** Returns whether there was no connection, so that no request was sent. */
export function isUnreachable(thrown: unknown): boolean {
  if (thrown instanceof AggregateError) {
    return thrown.errors.every(isUnreachable);
  }
  if (!(thrown instanceof Error)) {
    return false;
  }
  return UNREACHABLE.includes((thrown as Error & { code?: unknown }).code) || isUnreachable(thrown.cause);
}

/** Returns the text of the innermost cause: the text of fetch itself is only "fetch failed". */
export function words(thrown: unknown): string {
  let cause = thrown;
  while (cause instanceof Error && cause.cause !== undefined) {
    cause = cause.cause;
  }
  if (cause instanceof AggregateError) {
    return cause.errors.map(words).join(", ");
  }
  return cause instanceof Error ? cause.message : String(cause);
}

function failure(url: string, response: Answer["response"], body: unknown): Failure {
  const { status } = response;
  if (isProblem(body)) {
    return { problem: { ...body, status } };
  }
  // A proxy's own page. Some proxies send Retry-After.
  const detail = `${url} answered ${status}, but not as a gateway does`;
  if (!mayPass(status)) {
    return { problem: { status, code: "not_a_gateway", detail } };
  }
  const seconds = response.headers.get("retry-after") ?? "";
  return /^\d{1,9}$/.test(seconds)
    ? { problem: { status, code: "proxy", detail, retry_after_ms: Number(seconds) * 1000 } }
    : { unclear: detail };
}

/**
 * Returns whether a gateway refused the request, so that it granted nothing. A page of a proxy
 * leaves that open.
 */
export function isRefusal({ response, error }: Answer): boolean {
  return response.status >= 400 && response.status < 500 && isProblem(error);
}

export function isProblem(body: unknown): body is Problem {
  const { code, detail } = (body ?? {}) as Record<string, unknown>;
  return typeof code === "string" && typeof detail === "string";
}

/**
 * Returns whether a repeated request may succeed. The next gateway may not have this one's defect
 * (500).
 */
export function mayPass(status: number): boolean {
  return [408, 429, 500, 502, 503, 504].includes(status);
}

/** Returns the limit for one try to extend, of the time left. */
export function limitOfATry(left: number): number {
  return Math.min(Math.max(left / SHARE_OF_A_TRY, SHORTEST_TRY), LONGEST_TRY);
}
