// Builds elements. Text from the API becomes text nodes, so the browser never parses it as HTML.

const SVG = "http://www.w3.org/2000/svg";

/**
 * Makes an HTML element. Attributes that are functions become event listeners; `true` sets an
 * attribute without a value; `false` and `undefined` set none.
 */
export function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** Makes an SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") {
      element.addEventListener(name, value);
    } else if (value === true) {
      element.setAttribute(name, "");
    } else if (value !== false && value !== undefined) {
      element.setAttribute(name, value);
    }
  }
  element.append(...children);
  return element;
}

/** Sets a text if it is a new one. A text that stays the same costs no layout. */
export function setText(element, text) {
  if (element.textContent !== text) {
    element.textContent = text;
  }
}

/** The element of the page with this id. */
export function byId(id) {
  return document.getElementById(id);
}

/** Puts exactly these children, in this order, below the parent. Moves only those out of place. */
export function arrange(parent, children) {
  const wanted = new Set(children);
  for (const child of [...parent.children]) {
    if (!wanted.has(child)) {
      child.remove();
    }
  }
  let next = parent.firstChild;
  for (const child of children) {
    if (child === next) {
      next = next.nextSibling;
    } else {
      parent.insertBefore(child, next);
    }
  }
}
