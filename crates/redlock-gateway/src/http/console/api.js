// Calls the gateway: sends the key, turns errors into problems, and compares clocks.
//
// Paths are relative to the page, so the page works behind a proxy that adds a prefix.

/** The credentials that requests carry. They last as long as the tab. */
export const access = {
  get key() {
    return read("redlock-key");
  },
  set key(key) {
    write("redlock-key", key);
  },
  /** Whether the browser adds its own credentials: a client certificate, a password, a cookie. */
  get usesBrowser() {
    return read("redlock-browser") !== undefined;
  },
  set usesBrowser(uses) {
    write("redlock-browser", uses ? "yes" : undefined);
  },
};

// A browser may forbid storage. Then the values last until the page is left.
const fallback = new Map();

function read(name) {
  try {
    return sessionStorage.getItem(name) ?? undefined;
  } catch {
    return fallback.get(name);
  }
}

function write(name, value) {
  fallback.set(name, value);
  try {
    if (value === undefined) {
      sessionStorage.removeItem(name);
    } else {
      sessionStorage.setItem(name, value);
    }
  } catch {
    // `fallback` has it.
  }
}

/** An error answer of the gateway. */
export class Problem extends Error {
  constructor(status, { code = "", title, detail, retry_after_ms: pause } = {}) {
    super(detail ?? title ?? `The gateway answered with status ${status}.`);
    this.status = status;
    this.code = code;
    this.pauseMs = pause;
  }

  static async of(response) {
    const body = await response.json().catch(() => ({}));
    const seconds = Number(response.headers.get("retry-after"));
    return new Problem(response.status, { retry_after_ms: seconds * 1000, ...body });
  }
}

/** How far the gateway's clock is ahead of the browser's, in milliseconds. */
let clockOffset = 0;

/** The wall clock of the gateway, in Unix milliseconds. */
export function gatewayNow() {
  return Date.now() + clockOffset;
}

function compareClocks(response) {
  const date = Date.parse(response.headers.get("date") ?? "");
  if (!Number.isNaN(date)) {
    // The header has whole seconds, so a small difference means nothing.
    const offset = date + 500 - Date.now();
    clockOffset = Math.abs(offset) > 1500 ? offset : 0;
  }
}

/** Sends a request. Throws a `Problem` for an error, except for the statuses in `expected`. */
export async function request(path, { method, accept, headers = {}, signal, expected = [] } = {}) {
  const { key, usesBrowser } = access;
  const response = await fetch(path, {
    method,
    signal,
    headers: {
      ...headers,
      ...(accept === undefined ? {} : { accept }),
      ...(key === undefined ? {} : { authorization: `Bearer ${key}` }),
    },
    // Without credentials the browser never opens a window of its own that asks for a password.
    credentials: usesBrowser ? "same-origin" : "omit",
    cache: "no-store",
    redirect: "error",
  });
  compareClocks(response);
  if (!response.ok && !expected.includes(response.status)) {
    throw await Problem.of(response);
  }
  return response;
}

/** The path of the listing, or of its stream. */
export function listPath(prefix) {
  return `../locks?prefix=${encodeURIComponent(prefix)}`;
}

/** The path of a lock. */
export function lockPath(name, query = {}) {
  const parameters = new URLSearchParams(query).toString();
  return `../locks/${encodeURIComponent(name)}${parameters === "" ? "" : `?${parameters}`}`;
}

/** Waits, unless the signal ends the wait. */
export function sleep(ms, signal) {
  return new Promise((resolve) => {
    const end = () => {
      clearTimeout(timer);
      signal.removeEventListener("abort", end);
      resolve();
    };
    const timer = setTimeout(end, ms);
    signal.addEventListener("abort", end);
  });
}
