/// <reference lib="esnext.disposable" preserve="true" />
/**
 * A client of redlock-gateway: acquires a lock, extends it while work goes on, and tells at once when it is lost.
 *
 * ```ts
 * const client = new Client("http://127.0.0.1:8080");
 * await client.withLock("reports/nightly", { ttlMs: 30_000, waitMs: 60_000 }, async (signal, guard) => {
 *   await write(guard.fencingToken, { signal });
 * });
 * ```
 *
 * ```text
 *            acquire                 a third of the validity          margin
 *  sent ───────┬──────────────────────────────┬──────────────────────────┬──────┬─► time
 *              │ guard                        │ PATCH: a new deadline    │ lost │ deadline
 *                                             └─ 404, 409: lost now
 * ```
 *
 * What a guard promises: a lock that could not be extended is told lost while there is still the margin left of the time in which
 * nobody else can be granted it. One that was taken away (by force, or by its token) is told at the next extension, and may be
 * another's by then. What it cannot promise: that work which does not look stops. Give `guard.fencingToken` to whatever is
 * written to, and let it refuse smaller ones.
 *
 * @module
 */

import "./dispose.js";

export { Client, type ClientOptions, type LockList, type LockOptions, type LockStatus, type Work } from "./client.js";
export { now } from "./clock.js";
export {
  LockHeldError,
  LockLostError,
  type LossKind,
  type Problem,
  type ProblemCode,
  RedlockError,
  RefusedError,
  SetupError,
  UnavailableError,
} from "./errors.js";
export type { components, operations, paths } from "./generated/openapi.js";
export type { Guard } from "./guard.js";
