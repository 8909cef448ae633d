// Real masters and gateways, started by tests/clients/servers.py.

import { spawn } from "node:child_process";
import { createInterface } from "node:readline";

/** Starts them. `places` has their addresses, `order` carries out an order. */
export async function start(script, gateway) {
  const child = spawn("python3", [script, gateway], { stdio: ["pipe", "pipe", "inherit"] });
  const ended = new Promise((resolve) => child.once("exit", resolve));
  const lines = createInterface({ input: child.stdout })[Symbol.asyncIterator]();
  const answer = async () => {
    const { value, done } = await lines.next();
    if (done) {
      throw new Error("the servers have ended");
    }
    return JSON.parse(value);
  };
  return {
    places: await answer(),
    async order(order) {
      child.stdin.write(`${JSON.stringify(order)}\n`);
      const { error } = await answer();
      if (error !== undefined) {
        throw new Error(`${order.do}: ${error}`);
      }
    },
    async end() {
      child.stdin.end();
      await ended;
    },
  };
}

/** The longest TTL: no lock ends before a busy machine has shown it. */
export const LONG = 300_000;

/** A client of a gateway, with or without a key. */
export class Client {
  constructor(url, key) {
    this.url = url;
    this.headers = key === undefined ? {} : { authorization: `Bearer ${key}` };
  }

  async acquire(name, body) {
    return this.#call("POST", name, { body: JSON.stringify({ ttl_ms: LONG, ...body }) });
  }

  /** Waits in line for a lock. A scenario that fails earlier leaves the request alone. */
  wait(name, owner) {
    const lease = this.#granted(name, { ttl_ms: LONG, owner, wait_ms: 25_000 }, crypto.randomUUID());
    lease.catch(() => {});
    return lease;
  }

  /** Repeats a wait that has ended. The key keeps the place in line. */
  async #granted(name, body, key) {
    for (;;) {
      try {
        return await this.#call("POST", name, { body: JSON.stringify(body), key });
      } catch (error) {
        if (!error.message.includes(": 409 ")) {
          throw error;
        }
      }
    }
  }

  async extend(lease, body) {
    return this.#call("PATCH", lease.name, { body: JSON.stringify(body), token: lease.token });
  }

  async release(lease) {
    return this.#call("DELETE", lease.name, { token: lease.token });
  }

  async #call(method, name, { body, token, key }) {
    const response = await fetch(`${this.url}/locks/${encodeURIComponent(name)}`, {
      method,
      body,
      headers: {
        ...this.headers,
        ...(body === undefined ? {} : { "content-type": "application/json" }),
        ...(token === undefined ? {} : { "lock-token": token }),
        ...(key === undefined ? {} : { "idempotency-key": key }),
      },
    });
    const text = await response.text();
    if (!response.ok) {
      throw new Error(`${method} ${name}: ${response.status} ${text}`);
    }
    return text === "" ? {} : JSON.parse(text);
  }
}
