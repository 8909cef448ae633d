// What all dialogs share: a title, a way out, and the focus where it was.

import { byId, el } from "./dom.js";

/** Makes a modal dialog. The browser keeps the focus inside, and Esc closes it. */
export function makeDialog(id, className, ...children) {
  const dialog = el(
    "dialog",
    { id, class: className, "aria-labelledby": `${id}-title` },
    ...children,
  );
  // A press on the backdrop closes the dialog.
  dialog.addEventListener("pointerdown", ({ target, clientX: x, clientY: y }) => {
    const { left, right, top, bottom } = dialog.getBoundingClientRect();
    const isOutside = x < left || x > right || y < top || y > bottom;
    if (target === dialog && isOutside) {
      dialog.close();
    }
  });
  byId("dialogs").append(dialog);
  return dialog;
}

export function makeTitle(id, text = "") {
  return el("h2", { id: `${id}-title` }, text);
}
