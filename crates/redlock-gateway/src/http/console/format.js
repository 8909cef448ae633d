// Words and numbers for people.

const SPACE = "\u00a0";
const CLOCK = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });
const CLOCK_WITH_DAY = new Intl.DateTimeFormat("en-GB", {
  day: "numeric",
  month: "short",
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
});
const DAY_MS = 86_400_000;

/** A duration in its two largest units: "21 s", "4 min 12 s", "2 h 05 min", "3 d 04 h". */
export function duration(ms) {
  const seconds = Math.max(0, Math.floor(ms / 1000));
  const two = (number) => String(number).padStart(2, "0");
  if (seconds < 60) {
    return `${seconds}${SPACE}s`;
  }
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) {
    return `${minutes}${SPACE}min${SPACE}${two(seconds % 60)}${SPACE}s`;
  }
  const hours = Math.floor(minutes / 60);
  if (hours < 24) {
    return `${hours}${SPACE}h${SPACE}${two(minutes % 60)}${SPACE}min`;
  }
  return `${Math.floor(hours / 24)}${SPACE}d${SPACE}${two(hours % 24)}${SPACE}h`;
}

/** A time of day; with the day if that is not today. `ms` is Unix time in milliseconds. */
export function clock(ms, now = Date.now()) {
  const isToday = Math.abs(now - ms) < DAY_MS && new Date(ms).getDate() === new Date(now).getDate();
  return (isToday ? CLOCK : CLOCK_WITH_DAY).format(ms);
}

/** A whole number, with commas between thousands. */
export function count(number) {
  return number.toLocaleString("en");
}

/** "1 lock", "2 locks". */
export function counted(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/** A rate: "0", "0.3", "12", "1,204". */
export function rate(perSecond) {
  const digits = perSecond > 0 && perSecond < 10 ? 1 : 0;
  return perSecond.toLocaleString("en", { maximumFractionDigits: digits });
}

/** "a", "a, b", "a, b, c and 4 more". `total` may be more than the names that are known. */
export function listed(names, total = names.length, shown = 3) {
  const first = names.slice(0, shown).join(", ");
  const more = total - Math.min(shown, names.length);
  return more > 0 && first !== "" ? `${first} and ${count(more)} more` : first;
}

/** The label of a holder or waiter. Labels are optional. */
export function label({ owner, key }) {
  return owner ?? (key === undefined ? "no label" : `key ${key}`);
}
