// Reads server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html) from the
// body of an answer. It knows nothing of locks.

import { now, overdue } from "./clock.js";

/**
 * The connection counts as broken if nothing arrives for this long, in milliseconds. A gateway sends
 * a comment every 15 s.
 */
const SILENCE = 45_000;
/** The longest event, in characters. The largest one lists 100 waiters. */
const LONGEST_EVENT = 1_000_000;

/** One event, with its data parsed as JSON. */
export interface StreamEvent {
  type: string;
  data: unknown;
}

export class Events {
  readonly #reader: ReadableStreamDefaultReader<Uint8Array>;
  readonly #decoder = new TextDecoder();
  readonly #ready: StreamEvent[] = [];
  /** The part of the text that has no end of line yet. */
  #rest = "";
  #type = "";
  #data: string[] = [];
  /** When the last bytes arrived. */
  #heard = now();

  constructor(body: ReadableStream<Uint8Array>) {
    this.#reader = body.getReader();
  }

  /**
   * Returns the next event. Throws at `limit`, after a silence, or if the connection is broken. The
   * stream is of no use afterwards.
   */
  async next(limit = Infinity): Promise<StreamEvent> {
    for (;;) {
      const event = this.#ready.shift();
      if (event !== undefined) {
        return event;
      }
      const { value, done } = await this.#read(Math.min(limit, this.#heard + SILENCE));
      if (done) {
        throw new Error("the stream of events has ended");
      }
      this.#heard = now();
      this.#parse(this.#decoder.decode(value, { stream: true }));
    }
  }

  /** Closes the connection. */
  end(): void {
    this.#reader.cancel().catch(() => {});
  }

  async #read(limit: number): Promise<ReadableStreamReadResult<Uint8Array>> {
    const isRead = new AbortController();
    const late = overdue(limit, isRead.signal, false).then(() => {
      throw new Error("no event came in time");
    });
    try {
      return await Promise.race([this.#reader.read(), late]);
    } finally {
      // This ends the timer.
      isRead.abort();
    }
  }

  #parse(text: string): void {
    const lines = (this.#rest + text).split(/\r?\n/);
    this.#rest = lines.pop()!;
    if (this.#rest.length > LONGEST_EVENT) {
      throw new Error(`an event has more than ${LONGEST_EVENT} characters`);
    }
    for (const line of lines) {
      const [, field, value = ""] = /^(event|data)(?:: ?(.*))?$/s.exec(line) ?? [];
      if (field === "event") {
        this.#type = value;
      } else if (field === "data") {
        this.#data.push(value);
      } else if (line === "") {
        if (this.#data.length > 0) {
          this.#ready.push({ type: this.#type, data: JSON.parse(this.#data.join("\n")) });
        }
        this.#type = "";
        this.#data = [];
      }
    }
  }
}
