// Dark or light: as the system has it, unless the user chooses. The choice stays in this browser.

const NAME = "redlock-theme";
const root = document.documentElement;

function chosen() {
  try {
    return localStorage.getItem(NAME) ?? "auto";
  } catch {
    return "auto";
  }
}

function apply(theme) {
  if (theme === "auto") {
    delete root.dataset.theme;
  } else {
    root.dataset.theme = theme;
  }
}

apply(chosen());

/** Lets a `select` element choose the theme. */
export function bindTheme(select) {
  select.value = chosen();
  select.addEventListener("change", () => {
    apply(select.value);
    try {
      localStorage.setItem(NAME, select.value);
    } catch {
      // The browser forbids storage. Then the choice lasts until the page is left.
    }
  });
}
