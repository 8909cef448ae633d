/// <reference lib="esnext.disposable" preserve="true" />
/**
 * A client of redlock-gateway: acquires a lock, extends it while work goes on, and reports a loss
 * at once.
 *
 * ```ts
 * const client = new Client("http://127.0.0.1:8080"); await client.withLock("reports/nightly", {
 * ttlMs: 30_000, waitMs: 60_000 }, async (signal, guard) => {
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
 * If a lock cannot be extended, its guard reports the loss a margin before anybody else can be
 * granted the lock. If a lock is taken away (by force, or by its token), the guard reports the loss
 * at the next extension; the lock may be another's by then. A guard cannot stop work that does not
 * check it. Give `guard.fencingToken` to each resource you write to, and let the resource refuse
 * smaller tokens.
 *
 * @module
 */

import "./dispose.js";

export {
  Client,
  type ClientOptions,
  type LockList,
  type LockOptions,
  type LockStatus,
  type SetOptions,
  type Work,
} from "./client.js";
export { now } from "./clock.js";
export {
  type HeldLock,
  LockHeldError,
  LockLostError,
  type LossKind,
  type Problem,
  type ProblemCode,
  RedlockError,
  RefusedError,
  SetupError,
  type SlotHolder,
  UnavailableError,
} from "./errors.js";
export type { components, operations, paths } from "./generated/openapi.js";
export type { Guard } from "./guard.js";
export type { Waiting } from "./place.js";
