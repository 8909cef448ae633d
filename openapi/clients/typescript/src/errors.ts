import type { components } from "./generated/openapi.js";

/** The kind of a problem, as a word to program against. A newer gateway may say words that are not listed here. */
export type ProblemCode = components["schemas"]["Problem"]["code"] | (string & {});

/** The body of an error answer (RFC 9457), as far as a client needs it. */
export interface Problem {
  /** The HTTP status. */
  readonly status: number;
  /** The kind of problem. `proxy` and `not_a_gateway`: the answer was none of a gateway. */
  readonly code: ProblemCode;
  /** What happened, with the value and what is allowed. */
  readonly detail: string;
  /** Under this the gateway's log has more. */
  readonly request_id?: string;
  /** When trying again makes sense, in milliseconds. */
  readonly retry_after_ms?: number;
  /** The label of whoever holds the lock. */
  readonly holder?: string;
  /** When the holder's lock expires unless it is extended, in milliseconds. */
  readonly expires_in_ms?: number;
}

/** Everything that this package throws by itself. */
export class RedlockError extends Error {
  override readonly name: string = "RedlockError";
}

/** Nothing was asked: something that was given cannot work. */
export class SetupError extends RedlockError {
  override readonly name = "SetupError";
}

/** A gateway refuses the request as it is; a repetition would be refused too. The message says what is allowed. */
export class RefusedError extends RedlockError {
  override readonly name: string = "RefusedError";
  /** The whole answer. */
  readonly problem: Problem;

  /** @internal */
  constructor(problem: Problem, message = `${problem.code} (${problem.status}): ${problem.detail}`) {
    super(message);
    this.problem = problem;
  }

  /** The kind of problem, as a word to program against. */
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

  /** Under this the gateway's log has more. */
  get requestId(): string | undefined {
    return this.problem.request_id;
  }
}

/** Somebody else has the lock, and had it until the wait ended. */
export class LockHeldError extends RefusedError {
  override readonly name = "LockHeldError";

  /** @internal */
  constructor(problem: Problem) {
    const who = problem.holder === undefined ? "somebody" : JSON.stringify(problem.holder);
    const left = problem.expires_in_ms;
    const when = left === undefined ? "" : `; it expires in ${(left / 1000).toFixed(1)} s unless it is extended`;
    super(problem, `${who} holds the lock${when}`);
  }

  /** The holder's label. */
  get holder(): string | undefined {
    return this.problem.holder;
  }

  /** When the holder's lock expires unless it is extended, in milliseconds. */
  get expiresInMs(): number | undefined {
    return this.problem.expires_in_ms;
  }
}

/** No gateway decided. */
export class UnavailableError extends RedlockError {
  override readonly name = "UnavailableError";
  /** The last thing that was heard of each URL. */
  readonly heard: readonly string[];

  /** @internal */
  constructor(heard: readonly string[]) {
    super(`no gateway decided: ${heard.join("; ")}`);
    this.heard = heard;
  }
}

/**
 * Why a lock is not held any more, or may not be.
 * - `gone`: it is free or expired: somebody released it, or it was not extended in time.
 * - `taken`: somebody else holds it.
 * - `max_hold`: it was held for as long as a lock may be.
 * - `unconfirmed`: no gateway has confirmed an extension, and its deadline is near or over.
 */
export type LossKind = "gone" | "taken" | "max_hold" | "unconfirmed";

/** The lock was lost. The reason of `guard.signal`, and what `withLock` rejects with when work ended after the loss. */
export class LockLostError extends RedlockError {
  override readonly name = "LockLostError";
  /** The lock's name. */
  readonly lock: string;
  /** Why. */
  readonly kind: LossKind;
  /** Why, for people. */
  readonly detail: string;
  /** The label of whoever holds it now, where that is known. */
  readonly holder: string | undefined;

  /** @internal */
  constructor(lock: string, kind: LossKind, detail: string, holder?: string, options?: ErrorOptions) {
    super(`the lock ${JSON.stringify(lock)} was lost: ${detail}`, options);
    this.lock = lock;
    this.kind = kind;
    this.detail = detail;
    this.holder = holder;
  }

  /**
   * The loss in whatever was caught, if there is one. `await using` makes a `SuppressedError` of two when the block threw as
   * well.
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
  static told(lock: string, { code, detail, holder }: Problem): LockLostError {
    switch (code) {
      case "lock_not_found":
        return new LockLostError(lock, "gone", `it was released by somebody else or has expired (${detail})`);
      case "max_hold_reached":
        return new LockLostError(lock, "max_hold", `it was held for as long as it may be (${detail})`);
      default:
        return new LockLostError(lock, "taken", `${holder ?? "somebody else"} holds it`, holder);
    }
  }
}
