// Small charts of the last five minutes: grants, refusals and handoffs of this gateway.

import { el, setText, svg } from "./dom.js";
import { rate } from "./format.js";
import { Rates, counters } from "./metrics.js";

const MINUTES = 5;
const KEPT_MS = MINUTES * 60_000;
const WIDTH = 300;
const HEIGHT = 48;

class Chart {
  #rates = new Rates(KEPT_MS);
  #path = svg("path");
  #picture = svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
    this.#path,
  );
  #now = el("span", { class: "rate" });
  #peak = el("span", { class: "minor" });

  constructor(counter, title) {
    this.counter = counter;
    this.title = title;
    this.element = el(
      "figure",
      { class: `chart is-${counter}` },
      el("figcaption", {}, el("span", {}, title), this.#now, this.#peak),
      this.#picture,
    );
  }

  push(value, at) {
    this.#rates.push(value, at);
    const { latest, largest } = this.#rates;
    setText(this.#now, `${rate(latest)}/s`);
    setText(this.#peak, `peak ${rate(largest)}/s`);
    this.#picture.setAttribute(
      "aria-label",
      `${this.title}: ${rate(latest)} a second, ` +
        `at most ${rate(largest)} in the last ${MINUTES} minutes`,
    );
    this.#path.setAttribute("d", outline(this.#rates.points, largest, at));
  }
}

/** The outline of steps, one for each point, from the right edge to the left. */
function outline(points, largest, now) {
  const x = (at) => (WIDTH - ((now - at) / KEPT_MS) * WIDTH).toFixed(1);
  const y = (value) => (HEIGHT - (value / Math.max(largest, 1)) * (HEIGHT - 2)).toFixed(1);
  if (points.length < 2) {
    return "";
  }
  const steps = points.slice(1).map((point) => `V${y(point.rate)}H${x(point.at)}`);
  return `M${x(points[0].at)} ${HEIGHT}${steps.join("")}V${HEIGHT}Z`;
}

export class Charts {
  #charts = [
    new Chart("grants", "Grants"),
    new Chart("refusals", "Refusals"),
    new Chart("handoffs", "Handoffs"),
  ];
  #note;
  #place;

  constructor({ place, note }) {
    this.#place = place;
    this.#note = note;
    place.append(...this.#charts.map(({ element }) => element));
  }

  /** Takes a scrape of the metrics. */
  push(text, at = performance.now()) {
    const sums = counters(text);
    for (const chart of this.#charts) {
      chart.push(sums[chart.counter], at);
    }
    this.say("");
  }

  /** Says why there are no charts; an empty text shows them. */
  say(text) {
    setText(this.#note, text);
    this.#note.hidden = text === "";
    this.#place.hidden = text !== "";
  }
}
