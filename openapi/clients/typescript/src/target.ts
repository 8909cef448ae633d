// What a guard holds: one lock, or a set of locks. A target sends the requests and reads their
// answers.

import { type Answer, type Gateways, pathOf, type Try, Undecided } from "./gateways.js";
import type { components } from "./generated/openapi.js";
import { granted, isLoss, isMs, problemOf, type Result, resultsOf, slowest } from "./lease.js";

export type AcquireBody = components["schemas"]["AcquireBody"];
type SetBody = components["schemas"]["AcquireSetBody"];
type ExtendResult = components["schemas"]["ExtendResult"];

/** The token, or the key of an acquire whose answer never arrived. */
export type Credentials = { "Lock-Token": string } | { "Idempotency-Key": string };

/** An extended lease; durations are in milliseconds. */
export interface Extended {
  validity: number;
  elapsed: number;
  waiters: number | undefined;
}

export interface Target {
  readonly names: readonly string[];
  /** Names the target in errors and warnings. */
  readonly label: string;
  /** Whether its lease is extended together with those of other guards. */
  readonly isJoint: boolean;
  acquire(to: Try, key: string, body: AcquireBody): Promise<Answer>;
  extend(to: Try, token: string, ttl: number): Promise<Answer>;
  /** Reads the answer to `extend`: a lease for each lock. */
  readExtended(data: unknown): readonly Extended[];
  release(to: Try, header: Credentials): Promise<Answer>;
  readReleased(data: unknown): void;
  /** Ends the stream by which a gateway extends the lock, if there is one. */
  end(): void;
}

/** One lock. */
export class Single implements Target {
  readonly names: readonly string[];
  readonly isJoint: boolean = true;
  readonly #api: Gateways["api"];
  readonly #path: { name: string };
  readonly #slots: { slots?: number; take?: number };

  /** `slots` are those that the acquire asks for, because a release by key needs them. */
  constructor({ api }: Gateways, name: string, slots: { slots?: number; take?: number }) {
    this.names = [name];
    this.#api = api;
    this.#path = pathOf(name);
    this.#slots = slots;
  }

  get label(): string {
    return this.#path.name;
  }

  acquire(to: Try, key: string, body: AcquireBody): Promise<Answer> {
    const params = { path: this.#path, header: { "Idempotency-Key": key } };
    return this.#api.POST("/locks/{name}", { ...to, params, body: { ...body, ...this.#slots } });
  }

  extend(to: Try, token: string, ttl: number): Promise<Answer> {
    const params = { path: this.#path, header: { "Lock-Token": token } };
    return this.#api.PATCH("/locks/{name}", { ...to, params, body: { ttl_ms: ttl } });
  }

  readExtended(data: unknown): readonly Extended[] {
    return [granted(data)];
  }

  release(to: Try, header: Credentials): Promise<Answer> {
    const query = "Idempotency-Key" in header ? this.#slots : {};
    return this.#api.DELETE("/locks/{name}", { ...to, params: { path: this.#path, query, header } });
  }

  readReleased(): void {}

  end(): void {}

  /** Sends a POST whose answer is a stream of events. */
  protected stream(to: Try, header: Credentials, body: AcquireBody): Promise<Answer> {
    const headers = { accept: "text/event-stream", ...header };
    const request = { ...to, params: { path: this.#path }, headers, body: { ...body, ...this.#slots } };
    return this.#api.POST("/locks/{name}", { ...request, parseAs: "stream" });
  }
}

/** A set of locks, with one token for all of them. */
export class LockSet implements Target {
  readonly names: readonly string[];
  readonly isJoint = false;
  readonly #api: Gateways["api"];

  constructor({ api }: Gateways, names: readonly string[]) {
    this.names = [...names];
    this.#api = api;
  }

  /** All names. No name has a comma. */
  get label(): string {
    return this.names.join(", ");
  }

  acquire(to: Try, key: string, body: Omit<SetBody, "names">): Promise<Answer> {
    const params = { header: { "Idempotency-Key": key } };
    return this.#api.POST("/locks", { ...to, params, body: { ...body, names: [...this.names] } });
  }

  extend(to: Try, token: string, ttl: number): Promise<Answer> {
    const leases = this.names.map((name) => ({ name, token }));
    return this.#api.PATCH("/locks", { ...to, body: { leases, ttl_ms: ttl } });
  }

  /**
   * @throws {Undecided} unless all locks were extended. A lost lock counts more than a lock that may
   * be extended later.
   */
  readExtended(data: unknown): readonly Extended[] {
    const results = this.#resultsOf<ExtendResult>(data);
    const failed = results.filter(({ status }) => status !== 200);
    throwOne(failed.find(({ code = "" }) => isLoss(code)) ?? slowest(failed));
    return results.map(({ validity_ms, elapsed_ms, waiters }) => {
      if (!isMs(validity_ms) || !isMs(elapsed_ms)) {
        throw new Error("the answer has a result without validity");
      }
      return { validity: validity_ms, elapsed: elapsed_ms, waiters };
    });
  }

  release(to: Try, header: Credentials): Promise<Answer> {
    return this.#api.DELETE("/locks", { ...to, params: { query: { name: [...this.names] }, header } });
  }

  /** @throws {Undecided} unless all locks were released, or were not held. */
  readReleased(data: unknown): void {
    const results = this.#resultsOf<Result>(data);
    throwOne(results.find(({ status, code = "" }) => status !== 204 && !isLoss(code)));
  }

  end(): void {}

  #resultsOf<T extends Result>(data: unknown): readonly T[] {
    const results = resultsOf<T>(data, this.names.length);
    if (!results.every(({ name }, at) => name === this.names[at])) {
      throw new Error("the answer has the results of other locks");
    }
    return results;
  }
}

function throwOne(failed: Result | undefined): void {
  if (failed !== undefined) {
    throw new Undecided(problemOf(failed), failed.name);
  }
}
