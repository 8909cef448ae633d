// The tree of locks: the parts of names that follow the prefix, as links, each with the number of its
// locks.

import { arrange, el, setText } from "./dom.js";
import { count } from "./format.js";

const MOST_FOLDERS = 20;

/** The prefixes one level below `prefix`, each with the number of locks, in order. */
export function foldersBelow(prefix, names) {
  const folders = new Map();
  for (const name of names) {
    const end = name.indexOf("/", prefix.length);
    if (name.startsWith(prefix) && end >= 0) {
      const folder = name.slice(0, end + 1);
      folders.set(folder, (folders.get(folder) ?? 0) + 1);
    }
  }
  return [...folders].sort(([one], [other]) => (one < other ? -1 : 1));
}

/** The prefix one level above: "a/b/" for "a/b/c" and for "a/b/c/". */
export function folderAbove(prefix) {
  return prefix.slice(0, prefix.lastIndexOf("/", prefix.length - 2) + 1);
}

export class Folders {
  #place;
  #addressOf;
  #links = new Map();

  /** `addressOf`: the address of the page for a prefix. */
  constructor(place, addressOf) {
    this.#place = place;
    this.#addressOf = addressOf;
  }

  update(prefix, names) {
    const found = foldersBelow(prefix, names).slice(0, MOST_FOLDERS);
    const words = ([folder, locks]) => `${folder.slice(prefix.length)} ${count(locks)}`;
    const wanted = found.map((folder) => [folder[0], words(folder)]);
    if (prefix !== "") {
      wanted.unshift([folderAbove(prefix), "↑ up"]);
    }
    const links = new Map();
    for (const [folder, text] of wanted) {
      const link = this.#links.get(folder) ?? el("a");
      link.setAttribute("href", this.#addressOf(folder));
      setText(link, text);
      links.set(folder, link);
    }
    this.#links = links;
    arrange(this.#place, [...links.values()]);
    this.#place.hidden = links.size === 0;
  }
}
