// The dialog that confirms a forced release.

import { lockPath, request } from "./api.js";
import { makeDialog, makeTitle } from "./dialogs.js";
import { el, setText } from "./dom.js";
import { clock, counted, label } from "./format.js";

/** After a change of the holder, the button rests for so long. So nobody clicks without reading. */
const REST_MS = 1_500;

export class ForceDialog {
  #locks;
  #onDone;
  #name;
  #slot;
  #token;
  #title = makeTitle("force");
  #who = el("p", { class: "lead" });
  #then = el("p");
  #line = el("p");
  #error = el("p", { class: "error", role: "alert" });
  #cancel = el("button", { type: "button", click: () => this.#dialog.close() }, "Cancel");
  #button = el("button", { type: "button", class: "danger", click: () => this.#release() });
  #dialog;

  /** `onDone` is called with a sentence when a lock was released. */
  constructor(locks, onDone) {
    this.#locks = locks;
    this.#onDone = onDone;
    this.#dialog = makeDialog(
      "force",
      "box",
      this.#title,
      this.#who,
      this.#then,
      this.#line,
      this.#error,
      el("div", { class: "actions" }, this.#cancel, this.#button),
    );
    setText(this.#button, "Force release");
  }

  open(name, slot) {
    this.#name = name;
    this.#slot = slot;
    this.#token = this.#hold?.token;
    this.#say("");
    this.#button.disabled = false;
    this.#describe();
    this.#dialog.showModal();
    this.#cancel.focus();
  }

  /** Looks whether the lock has changed hands since the dialog was opened. */
  update() {
    if (!this.#dialog.open || this.#hold?.token === this.#token) {
      return;
    }
    this.#token = this.#hold?.token;
    this.#describe();
    this.#say(
      this.#hold === undefined
        ? "Nobody holds it any more."
        : "Somebody else holds it now. Read again who that is.",
    );
    this.#button.disabled = true;
    if (this.#hold !== undefined) {
      setTimeout(() => (this.#button.disabled = false), REST_MS);
    }
  }

  get #hold() {
    return this.#locks.get(this.#name)?.holds.get(this.#slot);
  }

  #describe() {
    const lock = this.#locks.get(this.#name);
    const hold = this.#hold;
    const what = lock?.hasSlots ? `slot ${this.#slot} of ${this.#name}` : this.#name;
    setText(this.#title, `Force release ${what}?`);
    if (hold === undefined) {
      setText(this.#who, "Nobody holds it.");
      setText(this.#then, "");
      setText(this.#line, "");
      return;
    }
    const holder = hold.isHidden ? "The holder, whom this key may not see," : label(hold);
    const since = hold.acquiredAt === undefined ? "" : ` since ${clock(hold.acquiredAt)}`;
    const token = hold.token === undefined ? "" : `, with fencing token ${hold.token}`;
    setText(
      this.#who,
      hold.isHidden ? "This key may not see who holds it." : `${holder} holds it${since}${token}.`,
    );
    setText(
      this.#then,
      "The lock becomes free at once. The former holder learns of it only at its next extension. " +
        "Until then, only a resource that checks fencing tokens refuses its writes.",
    );
    const waiting = lock.waitersTotal;
    const next = lock.waiters?.[0];
    const verb = waiting === 1 ? "waits" : "wait";
    const who = next === undefined ? "" : ` ${label(next)} is next.`;
    setText(this.#line, waiting > 0 ? `${counted(waiting, "client")} ${verb} here.${who}` : "");
  }

  #say(text) {
    setText(this.#error, text);
    this.#error.hidden = text === "";
  }

  async #release() {
    const name = this.#name;
    const query = this.#slot === 1 ? { force: true } : { force: true, slot: this.#slot };
    this.#button.disabled = true;
    this.#say("");
    try {
      const response = await request(lockPath(name, query), { method: "DELETE", expected: [404] });
      const done = response.status === 404 ? "was free already" : "was released by force";
      this.#dialog.close();
      this.#onDone(`${name} ${done}.`);
    } catch (error) {
      this.#say(error.message);
    } finally {
      this.#button.disabled = false;
    }
  }
}
