// Real masters and gateways, started by the script that REDLOCK_SERVERS names.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";

import type { Guard } from "redlock-gateway";

/**
 * How long a test waits for an event, in milliseconds: as long as all tests may take. It ends a test
 * that hangs, and never a test on a slow machine.
 */
export const PATIENCE = 20 * 60_000;
/**
 * The TTL of a lock that a guard keeps, in milliseconds. A busy machine may not run a process for
 * seconds. A lock that is extended a third of this after its grant outlasts more than three of them.
 */
export const TTL = 6_000;

export interface Places {
  gateways: [string, string];
  proxy: string;
  keyed: string;
  key: string;
}

type Order =
  | { do: "stop-masters" | "swallow"; count: number }
  | { do: "refuse"; status: number }
  | { do: "continue-masters" }
  | { do: "stop-gateway" | "continue-gateway" | "kill-gateway" | "start-gateway"; index: 0 | 1 };

export interface Servers {
  places: Places;
  order(order: Order): Promise<void>;
  end(): Promise<void>;
}

export async function start(): Promise<Servers> {
  const child = spawn("python3", [set("REDLOCK_SERVERS"), set("REDLOCK_GATEWAY")], {
    stdio: ["pipe", "pipe", "inherit"],
  });
  const ended = new Promise((resolve) => child.once("exit", resolve));
  const lines = createInterface({ input: child.stdout })[Symbol.asyncIterator]();
  const line = async (): Promise<object> => {
    const { value, done } = await lines.next();
    if (done) {
      throw new Error("the servers have ended");
    }
    return JSON.parse(value);
  };
  return {
    places: (await line()) as Places,
    async order(order) {
      child.stdin.write(`${JSON.stringify(order)}\n`);
      const answer = await line();
      if ("error" in answer) {
        throw new Error(`${order.do}: ${answer.error}`);
      }
    },
    async end() {
      child.stdin.end();
      await ended;
    },
  };
}

function set(name: string): string {
  const value = process.env[name];
  if (value === undefined) {
    throw new Error(`${name} is not set; start the tests by openapi/clients/typescript/check`);
  }
  return value;
}

/** For what no event tells: asks again until it is so. */
export async function eventually(what: string, isSo: () => Promise<boolean>): Promise<void> {
  for (const end = performance.now() + PATIENCE; !(await isSo()); await sleep(20)) {
    if (performance.now() > end) {
      throw new Error(`${what}: not within ${PATIENCE} ms`);
    }
  }
}

/** Waits for so many extensions. */
export async function extended(guard: Guard, times: number): Promise<void> {
  for (let time = 0; time < times; time++) {
    assert.ok(await guard.extended(), guard.loss?.message);
  }
}
