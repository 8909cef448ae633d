// Small charts of the last five minutes of this gateway, from the history that the gateway keeps.

import { el, setText, svg } from "./dom.js";
import { duration, rate } from "./format.js";

const MINUTES = 5;
const KEPT_MS = MINUTES * 60_000;
const WIDTH = 300;
const HEIGHT = 48;

class Chart {
  #path = svg("path");
  #picture = svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
    this.#path,
  );
  #now = el("span", { class: "rate" });
  #peak = el("span", { class: "minor" });

  /** `unit`: "/s" for a column of counts, which is shown as a rate. */
  constructor(column, title, unit) {
    this.column = column;
    this.title = title;
    this.unit = unit;
    this.element = el(
      "figure",
      { class: `chart is-${column}` },
      el("figcaption", {}, el("span", {}, title), this.#now, this.#peak),
      this.#picture,
    );
  }

  update(history, covered) {
    const isRate = this.unit === "/s";
    const heights = history[this.column].map((value, at) =>
      isRate ? (value * 1000) / history.length_ms[at] : value,
    );
    const latest = rate(heights.at(-1)) + this.unit;
    const largest = Math.max(...heights);
    const peak = rate(largest) + this.unit;
    setText(this.#now, latest);
    setText(this.#peak, `peak ${peak}`);
    const label = `${this.title}: ${latest}, at most ${peak} in the last ${covered}`;
    this.#picture.setAttribute("aria-label", label);
    this.#path.setAttribute("d", outline(heights, largest, history));
  }
}

/** The outline of steps, one for each sample, from the oldest at the left. The right edge is now. */
function outline(heights, largest, { age_ms: ages, length_ms: lengths }) {
  const x = (age) => Math.max(0, WIDTH - (age / KEPT_MS) * WIDTH).toFixed(1);
  const y = (height) => (HEIGHT - (height / Math.max(largest, 1)) * (HEIGHT - 2)).toFixed(1);
  const steps = heights.map((height, at) => `V${y(height)}H${x(ages[at])}`);
  return `M${x(ages[0] + lengths[0])} ${HEIGHT}${steps.join("")}V${HEIGHT}Z`;
}

/** How much time the samples cover. A gateway that has started lately has less than five minutes. */
export function covered({ age_ms: ages, length_ms: lengths }) {
  const ms = ages[0] + lengths[0];
  return ms < KEPT_MS ? duration(ms) : `${MINUTES} minutes`;
}

export class Charts {
  #charts = [
    new Chart("grants", "Grants", "/s"),
    new Chart("refusals", "Refusals", "/s"),
    new Chart("handoffs", "Handoffs", "/s"),
    new Chart("waiting", "Waiting", ""),
  ];
  #note;
  #place;
  #title;

  constructor({ place, note, title }) {
    this.#place = place;
    this.#note = note;
    this.#title = title;
    place.append(...this.#charts.map(({ element }) => element));
  }

  /** Shows an answer of `/console/history`. */
  update(history) {
    if (history.age_ms.length === 0) {
      this.say("The gateway has just started.");
      return;
    }
    const time = covered(history);
    setText(this.#title, `This gateway, last ${time}`);
    this.#charts.forEach((chart) => chart.update(history, time));
    this.say("");
  }

  /** Says why there are no charts; an empty text shows them. */
  say(text) {
    setText(this.#note, text);
    this.#note.hidden = text === "";
    this.#place.hidden = text !== "";
  }
}
