// The dialog for the API key. The key stays in this tab.

import { access } from "./api.js";
import { makeDialog, makeTitle } from "./dialogs.js";
import { el, setText } from "./dom.js";

/** What `key new` prints, and what a header may have. */
const USABLE = /^[!-~]+$/;

export class KeyDialog {
  #onChange;
  #input = el("input", {
    id: "key-input",
    type: "password",
    autocomplete: "off",
    spellcheck: "false",
    "aria-describedby": "key-help key-error",
  });
  #error = el("p", { id: "key-error", class: "error", role: "alert" });
  #forget = el(
    "button",
    { type: "button", click: () => this.#use(undefined, false) },
    "Forget the key",
  );
  #dialog;

  /** `onChange` is called when the credentials are new ones. */
  constructor(onChange) {
    this.#onChange = onChange;
    const form = el(
      "form",
      { submit: (event) => this.#submit(event) },
      makeTitle("key", "API key"),
      el(
        "p",
        { id: "key-help" },
        "The key needs the permissions list and inspect. With metrics it also sees the masters " +
          "and the charts. With force it may release locks of others. This tab keeps the key " +
          "until you close it.",
      ),
      el("label", { for: "key-input" }, "Key"),
      this.#input,
      this.#error,
      el(
        "div",
        { class: "actions" },
        this.#forget,
        el("button", { type: "button", click: () => this.#dialog.close() }, "Cancel"),
        el("button", { type: "submit", class: "primary" }, "Use this key"),
      ),
      el(
        "p",
        { class: "minor" },
        "Does your browser have a client certificate, or did you sign in to a proxy? ",
        el(
          "button",
          { type: "button", class: "link", click: () => this.#use(undefined, true) },
          "Use what the browser has",
        ),
      ),
    );
    this.#dialog = makeDialog("key", "box", form);
  }

  /** Asks for a key. `why`: what was wrong with the last one. */
  open(why = "") {
    setText(this.#error, why);
    this.#error.hidden = why === "";
    this.#forget.hidden = access.key === undefined && !access.usesBrowser;
    if (!this.#dialog.open) {
      this.#input.value = "";
      this.#dialog.showModal();
      this.#input.focus();
    }
  }

  #submit(event) {
    event.preventDefault();
    const key = this.#input.value.trim();
    if (USABLE.test(key)) {
      this.#use(key, false);
    } else {
      this.open("A key has no spaces, and only ASCII characters.");
    }
  }

  #use(key, usesBrowser) {
    access.key = key;
    access.usesBrowser = usesBrowser;
    this.#input.value = "";
    this.#dialog.close();
    this.#onChange();
  }
}
