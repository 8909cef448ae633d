// Commands for a shell, and buttons that copy a text.

import { access, lockPath } from "./api.js";
import { el, setText } from "./dom.js";

/** How long a button says that it has copied. */
const SAID_MS = 1_500;

/** A command about a lock. A key is named by a variable, so that it gets into no history. */
export function curl(method, name) {
  const url = new URL(lockPath(name, {}), location.href);
  const key = access.key === undefined ? "" : ' -H "Authorization: Bearer $KEY"';
  return `curl${method === "GET" ? "" : ` -X ${method}`}${key} '${url}'`;
}

/** A button that copies what `text` returns. Browsers allow that only over HTTPS and for localhost. */
export function copyButton(label, text) {
  const button = el("button", { type: "button", hidden: navigator.clipboard === undefined }, label);
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text());
      setText(button, "Copied");
    } catch {
      setText(button, "Not allowed");
    }
    setTimeout(() => setText(button, label), SAID_MS);
  });
  return button;
}
