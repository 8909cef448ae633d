// The gateways, and how one of them is asked until it answers.

import createClient, { type Client as Api } from "openapi-fetch";

import { now, reached } from "./clock.js";
import { type Problem, RefusedError, SetupError, UnavailableError } from "./errors.js";
import type { paths } from "./generated/openapi.js";

/** Between two rounds over all gateways: the first pause, and the longest, in milliseconds. */
const FIRST_PAUSE = 50;
const LONGEST_PAUSE = 2_000;
/** With less time an answer is not to be expected, and what was heard before tells more than its absence. */
export const SHORTEST_TRY = 50;
/** For requests that hold no lease up. */
export const ONE_TRY = 2_000;
export const ALL_TRIES = 5_000;

/** A timer that is so late was kept from running, in milliseconds. */
const LATE = 10;

/** Where a request goes, and what ends it early. */
export interface Try {
  baseUrl: string;
  signal: AbortSignal;
}

export interface Answer {
  data?: unknown;
  error?: unknown;
  response: Response;
}

export interface Limits {
  /** No answer is waited for beyond this moment. */
  until: number;
  /** So long at most for one gateway, in milliseconds. */
  oneTry: number;
  /** Ends it all: its reason is thrown. */
  signal?: AbortSignal | undefined;
}

/** How a request ended that brought nothing: with a problem, or with nothing that tells whether it was done. */
type Failure = { problem: Problem } | { unclear: string };

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
    const headers: Record<string, string> = { "user-agent": "redlock-gateway-typescript" };
    if (key !== undefined) {
      headers["authorization"] = `Bearer ${key.trim()}`;
      try {
        new Headers(headers);
      } catch {
        throw new SetupError("the API key cannot stand in a header");
      }
    }
    // No redirects: a token goes where it was meant to go.
    this.api = createClient<paths>({ headers, redirect: "manual" });
  }

  get count(): number {
    return this.#urls.length;
  }

  /**
   * Asks one gateway after the other until one answers, with pauses, and says when the request was sent that was answered.
   * What is asked must do no harm when it is done twice. `read` throws when an answer is none.
   */
  async ask<T>(
    send: (to: Try) => Promise<Answer>,
    read: (data: unknown) => T,
    { until, oneTry, signal }: Limits,
  ): Promise<{ answer: T; sent: number }> {
    let pause = FIRST_PAUSE;
    for (;;) {
      const heard: string[] = [];
      let soonest = Infinity;
      for (let asked = 0; asked < this.#urls.length; asked++) {
        signal?.throwIfAborted();
        const at = this.#current;
        const baseUrl = this.#urls[at]!;
        const sent = now();
        if (heard.length > 0 && until - sent < SHORTEST_TRY) {
          throw new UnavailableError(heard);
        }
        const result = await attempt(baseUrl, send, read, Math.min(oneTry, until - sent), signal);
        if ("answer" in result) {
          return { answer: result.answer, sent };
        }
        signal?.throwIfAborted();
        if ("problem" in result) {
          const refused = new RefusedError(result.problem);
          if (!mayPass(refused.status)) {
            throw refused;
          }
          heard.push(refused.message);
          soonest = Math.min(soonest, refused.retryAfterMs ?? 0);
        } else {
          heard.push(result.unclear);
          soonest = 0;
        }
        // Unless another request has gone on to the next one meanwhile.
        if (this.#current === at) {
          this.#current = (at + 1) % this.#urls.length;
        }
      }
      const rest = Math.max(pause * (0.5 + Math.random()), soonest);
      if (rest + SHORTEST_TRY >= until - now()) {
        throw new UnavailableError(heard);
      }
      await reached(now() + rest, signal);
      pause = Math.min(pause * 2, LONGEST_PAUSE);
    }
  }
}

/** A name as it may stand in a path. Anything else is encoded, and the gateway says what is wrong with it. */
export function pathOf(name: string): { name: string } {
  if (name === "" || name === "." || name === "..") {
    throw new SetupError(`${JSON.stringify(name)} is no name of a lock: paths of URLs end there`);
  }
  try {
    encodeURIComponent(name);
  } catch {
    throw new SetupError(`${JSON.stringify(name)} is no name of a lock: half of a character is in it`);
  }
  return { name };
}

function parsed(text: string): string {
  const refused = (why: string): SetupError =>
    // What is in front of an @ may be a password.
    new SetupError(`${JSON.stringify(text.slice(text.lastIndexOf("@") + 1))} is no URL of a gateway: ${why}`);
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
    throw refused("nothing but scheme, host, port and path belongs there; a key is an option of its own");
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
  const over = now() + limit;
  void reached(over, request.signal).then(async () => {
    // Where nothing could run for a while timers come first: an answer that has arrived meanwhile is read in the next turn.
    if (now() > over + LATE) {
      await reached(now() + LATE, request.signal);
    }
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
      return { unclear: `${url} answered ${response.status}: ${words(unreadable)}` };
    }
  } catch (thrown) {
    return {
      unclear: isLate ? `${url} did not answer within ${(limit / 1000).toFixed(1)} s` : `${url}: ${words(thrown)}`,
    };
  } finally {
    // This ends the timer too.
    end();
    signal?.removeEventListener("abort", end);
  }
}

/** In words, down to the cause: the text of fetch itself ends at "fetch failed". */
function words(thrown: unknown): string {
  let cause = thrown;
  while (cause instanceof Error && cause.cause !== undefined) {
    cause = cause.cause;
  }
  if (cause instanceof AggregateError) {
    return cause.errors.map(words).join(", ");
  }
  return cause instanceof Error ? cause.message : String(cause);
}

function failure(url: string, response: Response, body: unknown): Failure {
  const { status } = response;
  if (isProblem(body)) {
    return { problem: { ...body, status } };
  }
  // A proxy's own page. Some of them say when to come back.
  const detail = `${url} answered ${status}, and not in the words of a gateway`;
  if (!mayPass(status)) {
    return { problem: { status, code: "not_a_gateway", detail } };
  }
  const seconds = response.headers.get("retry-after") ?? "";
  return /^\d{1,9}$/.test(seconds)
    ? { problem: { status, code: "proxy", detail, retry_after_ms: Number(seconds) * 1000 } }
    : { unclear: detail };
}

function isProblem(body: unknown): body is Problem {
  const { code, detail } = (body ?? {}) as Record<string, unknown>;
  return typeof code === "string" && typeof detail === "string";
}

/** Whether the same, asked again, may go well. A defect of a gateway (500) may be gone with the next one. */
function mayPass(status: number): boolean {
  return [408, 429, 500, 502, 503, 504].includes(status);
}
