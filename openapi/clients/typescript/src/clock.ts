// The clock of deadlines. On Linux performance.now() and timers stand still while the machine
// sleeps (CLOCK_MONOTONIC). Two clocks run on: the wall clock, which somebody may set back
// meanwhile, and the machine's uptime (CLOCK_BOOTTIME). The uptime is coarse, and needs Linux and a
// Node.js with process.getBuiltinModule. So every jump of one of them ahead of performance.now()
// counts as time that has passed, and after a suspend a lock is known to be lost. Setting the wall
// clock ahead loses locks, but never keeps one that has expired.

/**
 * A clock that runs on while the machine sleeps, in milliseconds. Jumps below its noise add up
 * until they exceed it.
 */
interface Sleepless {
  read: () => number;
  noise: number;
  /** How far the clock is ahead of performance.now(). */
  offset: number;
}

/** The parts of Node.js that this module uses. A browser has none of them. */
interface MaybeNode {
  process?: { platform?: string; getBuiltinModule?: (name: "node:os") => { uptime: () => number } | undefined };
}

/** A timer that is later than this was blocked, in milliseconds. */
const LATE = 10;

/** Longest time between two readings in milliseconds; a longer pause would look like a jump. */
const PAUSE = 25;
/**
 * Timers stand still while the machine sleeps, so a long pause is slept in pieces of this length,
 * in milliseconds.
 */
const PIECE = 500;

const sleepless: Sleepless[] = [{ read: () => Date.now(), noise: 50, offset: Infinity }];
const { process } = globalThis as MaybeNode;
const os = process?.platform === "linux" ? process.getBuiltinModule?.("node:os") : undefined;
if (os !== undefined) {
  // Some containers get whole seconds.
  sleepless.push({ read: () => os.uptime() * 1_000, noise: 1_500, offset: Infinity });
}
let skipped = 0;

/**
 * Returns milliseconds on the clock of deadlines: `performance.now()` plus all jumps of the wall
 * clock or the machine's uptime ahead of it. Only differences are meaningful.
 */
export function now(): number {
  const before = performance.now();
  const readings = sleepless.map((clock) => clock.read());
  const monotonic = performance.now();
  // A pause between the readings would look like a jump back, and the next reading like a jump
  // ahead.
  if (monotonic - before < PAUSE) {
    const seen = sleepless.map((clock, at) => ({ clock, offset: readings[at]! - monotonic }));
    const jumps = seen.map(({ clock, offset }) => (offset > clock.offset + clock.noise ? offset - clock.offset : 0));
    const jump = Math.max(...jumps);
    skipped += jump;
    for (const { clock, offset } of seen) {
      // All clocks see the same sleep, so it counts once.
      clock.offset = jump > 0 ? offset : Math.min(clock.offset, offset);
    }
  }
  return monotonic + skipped;
}

/**
 * Resolves at the moment, also if the machine sleeps meanwhile, or at once when the signal is
 * aborted.
 */
export async function reached(moment: number, signal?: AbortSignal, keepsAlive = true): Promise<void> {
  for (let left = moment - now(); left > 0 && !signal?.aborted; left = moment - now()) {
    await pause(Math.min(left, PIECE), signal, keepsAlive);
  }
}

/**
 * Resolves at the moment, or at once when the signal is aborted. After a blocked event loop timers
 * run first. So a late timer waits for another turn of the loop, which reads what has arrived.
 */
export async function overdue(moment: number, signal: AbortSignal, keepsAlive = true): Promise<void> {
  await reached(moment, signal, keepsAlive);
  if (now() > moment + LATE) {
    await reached(now() + LATE, signal, keepsAlive);
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
