// Reads an event stream, as in the HTML standard, "Server-sent events". The browser's EventSource
// cannot send an API key, so the page reads the stream with fetch() and this parser.

const BREAK = /\r\n|\n|\r/;

/** Splits the text of a stream into events. */
export class EventParser {
  /** Text without a line break so far. A long line comes in many pieces. */
  #pieces = [];
  #id = "";
  #type = "";
  #data = [];
  /** The pause before a reconnect that the server asks for, in milliseconds. */
  retry = undefined;

  /** Takes the next piece of text. Returns the events that it completes. */
  push(text) {
    if (!BREAK.test(text)) {
      this.#pieces.push(text);
      return [];
    }
    let all = this.#pieces.join("") + text;
    // The line feed of a "\r\n" may be in the next piece.
    const held = all.endsWith("\r") ? "\r" : "";
    all = all.slice(0, all.length - held.length);
    const lines = all.split(BREAK);
    this.#pieces = [lines.pop() + held];
    return lines.map((line) => this.#line(line)).filter((event) => event !== undefined);
  }

  #line(line) {
    if (line === "") {
      return this.#dispatch();
    }
    const colon = line.indexOf(":");
    if (colon === 0) {
      return undefined;
    }
    const field = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + (line[colon + 1] === " " ? 2 : 1));
    switch (field) {
      case "data":
        this.#data.push(value);
        break;
      case "event":
        this.#type = value;
        break;
      case "id":
        this.#id = value.includes("\0") ? this.#id : value;
        break;
      case "retry":
        this.retry = /^[0-9]+$/.test(value) ? Number(value) : this.retry;
        break;
      default:
    }
    return undefined;
  }

  #dispatch() {
    const event = { id: this.#id, type: this.#type || "message", data: this.#data.join("\n") };
    const isEmpty = this.#data.length === 0;
    this.#type = "";
    this.#data = [];
    return isEmpty ? undefined : event;
  }
}

/**
 * Yields the events of a response's body. Calls `heard` for each piece of the stream, heartbeats
 * included.
 */
export async function* readEvents(body, parser, heard) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) {
        return;
      }
      heard();
      yield* parser.push(value);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
