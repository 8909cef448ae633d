// Follows the locks under a prefix: opens the event stream, notices when it falls silent, and opens
// it again.

import { Problem, listPath, request, sleep } from "./api.js";
import { EventParser, readEvents } from "./sse.js";

/** The gateway sends at least a heartbeat every 15 s. After this silence the connection is dead. */
const SILENCE_MS = 35_000;
const LONGEST_PAUSE_MS = 15_000;
const FIRST_PAUSE_MS = 1_000;

/** Errors that another attempt does not mend: the key or the prefix has to change first. */
const FINAL = [400, 401, 403, 404];

/**
 * What the stream is doing:
 *
 * - `connecting`: no answer yet
 * - `live`: events arrive
 * - `broken`: waits before another attempt, because of `error`
 * - `refused`: the gateway refused the stream with `error`, and there will be no other attempt
 */
export class Stream {
  state = "connecting";
  error = undefined;
  /** When the page was last up to date, in Unix milliseconds. */
  heardAt = undefined;
  #onEvent;
  #onState;
  #abort = new AbortController();
  #wake = () => {};

  constructor({ onEvent, onState }) {
    this.#onEvent = onEvent;
    this.#onState = onState;
    addEventListener("online", () => this.#wake());
    document.addEventListener("visibilitychange", () => document.hidden || this.#wake());
  }

  /** Follows this prefix from now on. The earlier stream ends. */
  follow(prefix) {
    this.#abort.abort();
    this.#abort = new AbortController();
    this.heardAt = undefined;
    this.#run(listPath(prefix), this.#abort.signal);
  }

  async #run(path, signal) {
    let lastId = "";
    let pause = FIRST_PAUSE_MS;
    this.#become("connecting", undefined);
    while (!signal.aborted) {
      const attempt = new AbortController();
      const end = () => attempt.abort();
      signal.addEventListener("abort", end);
      const parser = new EventParser();
      let error = new Error("The gateway ended the stream.");
      let isPlanned = false;
      try {
        for await (const event of this.#events(path, lastId, parser, attempt)) {
          if (signal.aborted) {
            return;
          }
          lastId = event.id;
          pause = parser.retry ?? FIRST_PAUSE_MS;
          this.heardAt = Date.now();
          this.#become("live", undefined);
          const data = JSON.parse(event.data);
          this.#onEvent(event.type, data);
          if (event.type === "end") {
            isPlanned = data.reason === "time";
            error = new Error(`The gateway ended the stream: ${data.reason}.`);
          }
        }
      } catch (caught) {
        // A browser does not tell why a connection failed.
        error = caught instanceof TypeError ? new Error("The gateway cannot be reached.") : caught;
      }
      signal.removeEventListener("abort", end);
      if (signal.aborted) {
        return;
      }
      if (isPlanned) {
        await sleep(100, signal);
        continue;
      }
      if (error instanceof Problem && FINAL.includes(error.status)) {
        this.#become("refused", error);
        return;
      }
      this.#become("broken", error);
      await this.#rest(Math.max(pause, error.pauseMs || 0), signal);
      pause = Math.min(pause * 2, LONGEST_PAUSE_MS);
    }
  }

  async *#events(path, lastId, parser, attempt) {
    let silence;
    const heard = () => {
      // Without a majority of masters, the stream is open and has no snapshot. Then the page is not
      // up to date.
      if (this.state === "live") {
        this.heardAt = Date.now();
      }
      clearTimeout(silence);
      silence = setTimeout(() => attempt.abort(new Error("Nothing came for 35 s.")), SILENCE_MS);
    };
    try {
      silence = setTimeout(() => attempt.abort(new Error("No answer came.")), SILENCE_MS);
      const response = await request(path, {
        accept: "text/event-stream",
        headers: lastId === "" ? {} : { "last-event-id": lastId },
        signal: attempt.signal,
      });
      if (!response.headers.get("content-type")?.startsWith("text/event-stream")) {
        throw new Error("The answer is not an event stream. Is a proxy in between?");
      }
      heard();
      yield* readEvents(response.body, parser, heard);
    } finally {
      clearTimeout(silence);
    }
  }

  /** Waits before the next attempt. The times vary, so that many pages do not come back at once. */
  async #rest(ms, signal) {
    const woken = new AbortController();
    this.#wake = () => woken.abort();
    await sleep(ms * (0.75 + Math.random() / 2), AbortSignal.any([signal, woken.signal]));
    this.#wake = () => {};
  }

  #become(state, error) {
    if (this.state !== state || this.error !== error) {
      this.state = state;
      this.error = error;
      this.#onState();
    }
  }
}
