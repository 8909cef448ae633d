// The clock of deadlines. On Linux neither performance.now() nor a timer goes on while the machine sleeps, and nothing that
// does can be read without native code. So every jump of the wall clock ahead of performance.now() counts as time that has
// passed: after a night asleep a lock is known to be lost. Somebody who sets the wall clock ahead loses locks; nobody keeps one
// that has expired.

/** Jumps smaller than this are noise, in milliseconds; they add up until they are not. */
const NOISE = 50;
/** Timers stand still while the machine sleeps; so a long pause is slept in pieces, in milliseconds. */
const PIECE = 500;

let skipped = 0;
let offset = Infinity;

/**
 * Milliseconds on the clock of deadlines: `performance.now()` and what the wall clock has jumped ahead of it.
 * Only differences mean something.
 */
export function now(): number {
  const before = performance.now();
  const wall = Date.now();
  const monotonic = performance.now();
  // A pause between the readings would look like a jump back, and the next reading like one ahead.
  if (monotonic - before < NOISE / 2) {
    const seen = wall - monotonic;
    if (seen > offset + NOISE) {
      skipped += seen - offset;
      offset = seen;
    } else {
      offset = Math.min(offset, seen);
    }
  }
  return monotonic + skipped;
}

/** Resolves when the moment has come, also when the machine has slept meanwhile, or at once when the signal is aborted. */
export async function reached(moment: number, signal?: AbortSignal, keepsAlive = true): Promise<void> {
  for (let left = moment - now(); left > 0 && !signal?.aborted; left = moment - now()) {
    await pause(Math.min(left, PIECE), signal, keepsAlive);
  }
}

function pause(ms: number, signal: AbortSignal | undefined, keepsAlive: boolean): Promise<void> {
  return new Promise((resolve) => {
    const end = (): void => {
      clearTimeout(timer);
      signal?.removeEventListener("abort", end);
      resolve();
    };
    const timer = setTimeout(end, ms);
    signal?.addEventListener("abort", end);
    if (!keepsAlive) {
      (timer as unknown as { unref?: () => void }).unref?.();
    }
  });
}
