import type { components } from "./generated/openapi.js";

/** The kind of a problem, for programs. A newer gateway may send codes that are not listed here. */
export type ProblemCode = components["schemas"]["Problem"]["code"] | (string & {});

/** The holder of one slot of a lock. */
export type SlotHolder = components["schemas"]["SlotHolder"];

/** A held lock that kept a set from being granted. */
export type HeldLock = components["schemas"]["HeldLock"];

/** The part of an error answer (RFC 9457) that a client needs. */
export interface Problem {
  /** The HTTP status. */
  readonly status: number;
  /** The kind of problem. `proxy` and `not_a_gateway`: something other than a gateway answered. */
  readonly code: ProblemCode;
  /** What happened, with the value and what is allowed. */
  readonly detail: string;
  /** Identifies the request in the gateway's log. */
  readonly request_id?: string;
  /** When trying again makes sense, in milliseconds. */
  readonly retry_after_ms?: number;
  /** The holder's label. */
  readonly holder?: string;
  /** When the holder's lock expires unless it is extended, in milliseconds. */
  readonly expires_in_ms?: number;
  /** Since when the holder has the lock (RFC 3339). */
  readonly acquired_at?: string;
  /** The holders of the slots that are taken, in the order of the slots. */
  readonly holders?: readonly SlotHolder[];
  /** The lock that kept a set from being granted; others of the set may be held too. */
  readonly held?: readonly HeldLock[];
  /** The place of this request in this gateway's line for the lock; 1 is next. */
  readonly queue_position?: number;
  /** How long the gateway keeps that place, in milliseconds. Absent if it keeps none. */
  readonly queue_place_expires_ms?: number;
}

/** The base class of all errors of this package. */
export class RedlockError extends Error {
  override readonly name: string = "RedlockError";
  /**
   * The lock's name. For a set it has all names, separated by commas. Undefined if the error is
   * about no lock in particular.
   */
  readonly lock: string | undefined;

  /** @internal */
  constructor(message: string, lock?: string, options?: ErrorOptions) {
    super(lock === undefined ? message : `lock ${JSON.stringify(lock)}: ${message}`, options);
    this.lock = lock;
  }
}

/** An argument cannot work; no request was sent. */
export class SetupError extends RedlockError {
  override readonly name = "SetupError";
}

/**
 * A gateway refuses the request; a repetition would be refused too. The message says what is
 * allowed.
 */
export class RefusedError extends RedlockError {
  override readonly name: string = "RefusedError";
  /** The whole answer. */
  readonly problem: Problem;

  /** @internal */
  constructor(problem: Problem, lock?: string) {
    super(`${problem.code} (${problem.status}): ${problem.detail}`, lock);
    this.problem = problem;
  }

  /** The kind of problem, for programs. */
  get code(): ProblemCode {
    return this.problem.code;
  }

  /** The HTTP status. */
  get status(): number {
    return this.problem.status;
  }

  /** What happened, with the value and what is allowed. */
  get detail(): string {
    return this.problem.detail;
  }

  /** When trying again makes sense, in milliseconds. */
  get retryAfterMs(): number | undefined {
    return this.problem.retry_after_ms;
  }

  /** Identifies the request in the gateway's log. */
  get requestId(): string | undefined {
    return this.problem.request_id;
  }
}

/** Somebody else held the lock until the wait ended. */
export class LockHeldError extends RefusedError {
  override readonly name = "LockHeldError";

  /** The holder's label. */
  get holder(): string | undefined {
    return this.problem.holder;
  }

  /** When the holder's lock expires unless it is extended, in milliseconds. */
  get expiresInMs(): number | undefined {
    return this.problem.expires_in_ms;
  }

  /** Since when the holder has the lock (RFC 3339), if the gateway says so. */
  get acquiredAt(): string | undefined {
    return this.problem.acquired_at;
  }

  /** The holders of the slots that are taken; undefined for a lock without slots. */
  get holders(): readonly SlotHolder[] | undefined {
    return this.problem.holders;
  }

  /** The lock that kept a set from being granted; undefined for a single lock. */
  get held(): readonly HeldLock[] | undefined {
    return this.problem.held;
  }

  /** The last place in the gateway's line for the lock, if the gateway says so; 1 is next. */
  get position(): number | undefined {
    return this.problem.queue_position;
  }
}

/** No gateway decided. */
export class UnavailableError extends RedlockError {
  override readonly name = "UnavailableError";
  /** The last answer or failure of each URL. */
  readonly heard: readonly string[];

  /** @internal */
  constructor(heard: readonly string[], lock?: string) {
    super(`no gateway decided: ${heard.join("; ")}`, lock);
    this.heard = heard;
  }
}

/**
 * Why a lock is no longer held, or may no longer be held.
 * - `gone`: somebody released the lock, or it expired.
 * - `taken`: somebody else holds it.
 * - `max_hold`: the lock was held for the longest time that is allowed.
 * - `unconfirmed`: no gateway confirmed an extension, and the deadline is near or over.
 */
export type LossKind = "gone" | "taken" | "max_hold" | "unconfirmed";

/**
 * The lock was lost. The reason of `guard.signal`, and the error of `withLock` if work ended after
 * the loss.
 */
export class LockLostError extends RedlockError {
  override readonly name = "LockLostError";
  /** The lock's name. Of a set: the lock that was lost, or all names with the kind `unconfirmed`. */
  declare readonly lock: string;
  /** The kind of loss, for programs. */
  readonly kind: LossKind;
  /** The reason, for people. */
  readonly detail: string;
  /** The label of the new holder, if known. */
  readonly holder: string | undefined;

  /** @internal */
  constructor(lock: string, kind: LossKind, detail: string, holder?: string, options?: ErrorOptions) {
    super(`the lock was lost: ${detail}`, lock, options);
    this.kind = kind;
    this.detail = detail;
    this.holder = holder;
  }

  /**
   * Finds the loss in a caught error, if there is one. If the block of an `await using` threw too,
   * JavaScript makes one `SuppressedError` of both errors.
   */
  static in(caught: unknown): LockLostError | undefined {
    if (caught instanceof LockLostError) {
      return caught;
    }
    const both = caught instanceof Error ? (caught as Error & { error?: unknown; suppressed?: unknown }) : undefined;
    return both?.name === "SuppressedError"
      ? (LockLostError.in(both.error) ?? LockLostError.in(both.suppressed))
      : undefined;
  }

  /** @internal */
  because(cause: unknown): LockLostError {
    return cause === this ? this : new LockLostError(this.lock, this.kind, this.detail, this.holder, { cause });
  }

  /** @internal */
  static unconfirmed(lock: string, heard: readonly string[]): LockLostError {
    const detail = `no gateway has confirmed an extension before its deadline: ${heard.join("; ")}`;
    return new LockLostError(lock, "unconfirmed", detail);
  }

  /** @internal */
  static fromProblem(lock: string, { code, detail, holder }: Problem): LockLostError {
    switch (code) {
      case "lock_not_found":
        return new LockLostError(lock, "gone", `it was released by somebody else or has expired (${detail})`);
      case "max_hold_reached":
        return new LockLostError(lock, "max_hold", `it was held for the longest time that is allowed (${detail})`);
      default:
        return new LockLostError(lock, "taken", `${holder ?? "somebody else"} holds it`, holder);
    }
  }
}
