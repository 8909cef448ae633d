// The masters, and what each of them does.

import { arrange, el, setText } from "./dom.js";
import { counted } from "./format.js";
import { SILENT } from "./status.js";
import { masterState, readiness } from "./words.js";

// The section of the documents for a master in trouble.
const NO_VOTE = "symptoms#a-master-does-not-vote";
const EVICTIONS = "symptoms#a-master-evicts-keys";
const SECTIONS = {
  quarantined: "masters",
  catching_up: "runbook#upgrading-masters",
  connecting: NO_VOTE,
};

class Master {
  #node;
  #state = el("span", { class: "state" });
  #more = el("span", { class: "minor" });
  #help = el("a", {}, "What to do");

  constructor(name) {
    this.element = el(
      "li",
      {},
      el("span", { class: "dot", "aria-hidden": "true" }),
      el("span", { class: "name" }, name),
      this.#state,
      this.#help,
      this.#more,
    );
  }

  update(node) {
    this.#node = node;
    const { detail = "", advice = "", evicted_keys: evicted = 0 } = node;
    const evictions = evicted > 0 ? `evicted ${counted(evicted, "key")}: locks may be lost` : "";
    const parts = [detail, evictions, advice === "" ? "" : `Advice: ${advice}`];
    setText(this.#more, parts.filter((part) => part !== "").join(". "));
    const section = SECTIONS[node.state] ?? (evicted > 0 ? EVICTIONS : NO_VOTE);
    this.#help.href = `../docs/${section}`;
    this.tick();
  }

  tick() {
    const { tone, words } = masterState(this.#node);
    this.element.className = `is-${tone}`;
    this.element.classList.toggle("has-more", this.#more.textContent !== "");
    setText(this.#state, words);
    this.#help.hidden = tone === "good";
  }
}

export class Masters {
  /** The status of `/readyz`, or `SILENT`. Undefined before the first answer. */
  readiness = undefined;
  #masters = new Map();
  #list;
  #sentence;
  #note;

  constructor({ list, sentence, note }) {
    this.#list = list;
    this.#sentence = sentence;
    this.#note = note;
  }

  /** Takes the body of `/readyz`. */
  update({ status, nodes }) {
    this.readiness = status;
    const { tone, words } = readiness(status);
    this.#sentence.className = `is-${tone}`;
    setText(this.#sentence, words);
    if (status === "no_quorum") {
      this.#sentence.append(" ", el("a", { href: "../docs/symptoms#quorum-lost" }, "What to do"));
    }
    const known = this.#masters;
    this.#masters = new Map();
    for (const node of nodes ?? []) {
      const master = known.get(node.node) ?? new Master(node.node);
      master.update(node);
      this.#masters.set(node.node, master);
    }
    arrange(
      this.#list,
      [...this.#masters.values()].map(({ element }) => element),
    );
    this.#say(
      nodes === undefined ? "A key with the metrics permission also sees each master." : "",
    );
  }

  /** Says that `/readyz` has no answer. */
  fail() {
    this.readiness = SILENT;
    this.#sentence.className = "is-bad";
    setText(this.#sentence, "No answer from /readyz, so the state of the masters is unknown.");
    this.#masters.clear();
    arrange(this.#list, []);
    this.#say("");
  }

  /** Shows that time has passed. */
  tick() {
    for (const master of this.#masters.values()) {
      master.tick();
    }
  }

  #say(text) {
    setText(this.#note, text);
    this.#note.hidden = text === "";
    this.#list.hidden = text !== "" || this.#masters.size === 0;
  }
}
