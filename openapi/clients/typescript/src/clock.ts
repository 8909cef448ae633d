// The clock of deadlines. On Linux neither performance.now() nor a timer goes on while the machine sleeps (CLOCK_MONOTONIC). Two
// clocks do: the wall clock, which somebody may set back meanwhile, and the machine's uptime (CLOCK_BOOTTIME), which is coarse, and
// only there where the system is Linux and Node.js has process.getBuiltinModule. So every jump of one of them ahead of
// performance.now() counts as time that has passed: after a night asleep a lock is known to be lost. Somebody who sets the wall
// clock ahead loses locks; nobody keeps one that has expired.

/** A clock that goes on while the machine sleeps, in milliseconds. Jumps smaller than its noise add up until they are not. */
interface Sleepless {
  read: () => number;
  noise: number;
  /** How far it is ahead of performance.now(). */
  offset: number;
}

/** What of Node.js is asked for. In a browser there is none of it. */
interface MaybeNode {
  process?: { platform?: string; getBuiltinModule?: (name: "node:os") => { uptime: () => number } | undefined };
}

/** A longer pause between two readings would look like a jump, in milliseconds. */
const PAUSE = 25;
/** Timers stand still while the machine sleeps; so a long pause is slept in pieces, in milliseconds. */
const PIECE = 500;

const sleepless: Sleepless[] = [{ read: () => Date.now(), noise: 50, offset: Infinity }];
const { process } = globalThis as MaybeNode;
const os = process?.platform === "linux" ? process.getBuiltinModule?.("node:os") : undefined;
if (os !== undefined) {
  // Some containers are told whole seconds.
  sleepless.push({ read: () => os.uptime() * 1_000, noise: 1_500, offset: Infinity });
}
let skipped = 0;

/**
 * Milliseconds on the clock of deadlines: `performance.now()` and what the wall clock or the machine's uptime has jumped ahead of it.
 * Only differences mean something.
 */
export function now(): number {
  const before = performance.now();
  const readings = sleepless.map((clock) => clock.read());
  const monotonic = performance.now();
  // A pause between the readings would look like a jump back, and the next reading like one ahead.
  if (monotonic - before < PAUSE) {
    const seen = sleepless.map((clock, at) => ({ clock, offset: readings[at]! - monotonic }));
    const jumps = seen.map(({ clock, offset }) => (offset > clock.offset + clock.noise ? offset - clock.offset : 0));
    const jump = Math.max(...jumps);
    skipped += jump;
    for (const { clock, offset } of seen) {
      // All have seen the same sleep: it counts once.
      clock.offset = jump > 0 ? offset : Math.min(clock.offset, offset);
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
