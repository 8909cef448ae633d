// One lock that its gateway extends, for as long as the client keeps a stream of events open.
//
// A POST opens the stream, and its first event decides the request. There is one stream at a time:
// the next POST first ends the stream before it. Whether the lock is lost is for the guard to say.

import { now } from "./clock.js";
import { type StreamEvent, Events } from "./events.js";
import { type Answer, isProblem, type Try } from "./gateways.js";
import { type AcquireBody, type Credentials, Single } from "./target.js";

/** One lock, held by a stream. */
export class Streamed extends Single {
  override readonly isJoint = false;
  /** When the request of the stream was sent. */
  sent = 0;
  /** The gateway of the stream. */
  gateway = "";
  #request = new AbortController();
  #events: Events | undefined;

  override acquire(to: Try, key: string, body: AcquireBody): Promise<Answer> {
    return this.#open(to, { "Idempotency-Key": key }, body);
  }

  /** Continues the hold by a new stream, at any gateway. */
  override extend(to: Try, token: string, ttl: number): Promise<Answer> {
    return this.#open(to, { "Lock-Token": token }, { ttl_ms: ttl });
  }

  /** Returns the next event of the stream. Throws at `limit`, and if the stream is broken. */
  async next(limit: number): Promise<StreamEvent> {
    if (this.#events === undefined) {
      throw new Error("no stream is open");
    }
    return this.#events.next(limit);
  }

  override end(): void {
    this.#request.abort();
    // Node.js forgets the signal of a request that it has collected as garbage. That leaves the
    // connection open, and the gateway would go on extending the lock.
    this.#events?.end();
  }

  async #open(to: Try, header: Credentials, body: AcquireBody): Promise<Answer> {
    this.end();
    this.#events = undefined;
    const { signal } = (this.#request = new AbortController());
    // The signal of the try ends the request until it is decided, and not the stream afterwards.
    const end = (): void => this.end();
    to.signal.addEventListener("abort", end);
    this.gateway = to.baseUrl;
    this.sent = now();
    try {
      const answer = await this.stream({ ...to, signal }, header, body);
      return answer.response.ok ? await this.#decided(answer) : answer;
    } catch (error) {
      this.end();
      throw error;
    } finally {
      to.signal.removeEventListener("abort", end);
    }
  }

  /** Reads events until one of them decides the request. */
  async #decided({ data: body, response }: Answer): Promise<Answer> {
    // Set before the check, so that a failure closes the connection.
    const events = (this.#events = new Events(body as ReadableStream<Uint8Array>));
    if (!/^text\/event-stream\b/i.test(response.headers.get("content-type") ?? "")) {
      throw new Error("the answer is not a stream of events");
    }
    for (;;) {
      const { type, data } = await events.next();
      if (type === "granted" || type === "extended") {
        return { data, response };
      }
      if ((type === "refused" || type === "lost") && isProblem(data)) {
        return { error: data, response: { ok: false, status: data.status, headers: response.headers } };
      }
      if (type !== "waiting") {
        throw new Error(`the stream of events began with ${JSON.stringify(type)}`);
      }
    }
  }
}
