// A real Chromium that shows the console, and questions about what it shows.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";

/**
 * How long to wait for an event, in milliseconds: as long as all tests may take. It ends a test that
 * hangs, and never a test on a slow machine.
 */
export const PATIENCE = 20 * 60_000;

/** Packages are installed outside of the source tree, in the folder that CONSOLE_TOOLS names. */
const tools = createRequire(join(process.env.CONSOLE_TOOLS ?? import.meta.dirname, "package.json"));
const puppeteer = tools("puppeteer-core");
const axe = readFileSync(tools.resolve("axe-core/axe.min.js"), "utf8");

export const WIDE = { width: 1440, height: 900 };
export const NARROW = { width: 390, height: 844 };

export async function launch() {
  const executablePath = process.env.CHROMIUM ?? "/usr/bin/chromium";
  // In containers tests run as root, where Chromium has no sandbox.
  const args = ["--no-sandbox", "--disable-gpu"];
  return puppeteer.launch({ executablePath, args, timeout: PATIENCE, protocolTimeout: PATIENCE });
}

/** The console in a tab of its own. */
export class Console {
  /** What the browser complained about. */
  complaints = [];

  static async open(browser, url, { width, height } = WIDE) {
    const context = await browser.createBrowserContext();
    const shown = new Console();
    shown.page = await context.newPage();
    shown.page.setDefaultTimeout(PATIENCE);
    shown.page.on("pageerror", (error) => shown.complaints.push(String(error)));
    shown.page.on("console", (message) => {
      // A refused or broken request is logged, too. The page deals with those.
      const isRequest = message.text().startsWith("Failed to load resource");
      if (["error", "warn"].includes(message.type()) && !isRequest) {
        shown.complaints.push(message.text());
      }
    });
    await shown.page.setViewport({ width, height });
    await shown.page.goto(url);
    return shown;
  }

  async close() {
    assert.deepEqual(this.complaints, [], "the browser complained");
    await this.page.browserContext().close();
  }

  /** The visible text of the first element that fits; empty if there is none. */
  text(selector) {
    return this.page.evaluate((selector) => {
      const text = document.querySelector(selector)?.innerText ?? "";
      return text.replaceAll(/\s+/g, " ").trim();
    }, selector);
  }

  /** Waits until the text of an element fits. */
  async shows(selector, pattern) {
    const end = performance.now() + PATIENCE;
    let text;
    do {
      text = await this.text(selector);
      if (pattern.test(text)) {
        return text;
      }
      await sleep(20);
    } while (performance.now() < end);
    throw new Error(`${selector} shows ${JSON.stringify(text)}, not ${pattern}`);
  }

  /** Waits until the table has, or has not, a row for this lock whose text fits. */
  row(name, pattern) {
    return this.shows(`tr[data-lock="${name}"]`, pattern);
  }

  gone(name) {
    return this.shows(`tr[data-lock="${name}"]`, /^$/);
  }

  /** Waits until the feed says this about a lock. */
  async feed(pattern) {
    return this.shows("#feed", pattern);
  }

  /** Enters an API key when the page asks for one. */
  async enterKey(key) {
    await this.shows("#status", /^key needed$/);
    await this.type("#key-input", key);
    await this.page.keyboard.press("Enter");
  }

  async type(selector, text) {
    await this.page.$eval(selector, (input) => (input.value = ""));
    await this.page.type(selector, text);
  }

  /** Waits for the first visible button with this text, and clicks it. */
  async click(text) {
    const end = performance.now() + PATIENCE;
    const click = (text) => {
      const buttons = [...document.querySelectorAll("button:enabled, .folders a")];
      const button = buttons.find((it) => it.checkVisibility() && it.innerText.trim() === text);
      button?.click();
      return button !== undefined;
    };
    while (!(await this.page.evaluate(click, text))) {
      assert.ok(performance.now() < end, `there is no button ${text}`);
      await sleep(20);
    }
  }

  /** Waits until the page has such a title. */
  async titled(pattern) {
    for (const end = performance.now() + PATIENCE; !pattern.test(await this.page.title()); ) {
      assert.ok(performance.now() < end, `the title is ${await this.page.title()}`);
      await sleep(20);
    }
  }

  /** Sets dark or light, and reduced motion. */
  async look({ scheme = "light", size = WIDE }) {
    await this.page.setViewport(size);
    await this.page.emulateMediaFeatures([
      { name: "prefers-color-scheme", value: scheme },
      { name: "prefers-reduced-motion", value: "reduce" },
    ]);
  }

  /** Fails if axe finds a violation, or if the page is wider than the window. */
  async isAccessible(what) {
    await this.page.evaluate(axe);
    const violations = await this.page.evaluate(async () => {
      const { violations } = await globalThis.axe.run();
      const htmlOf = (nodes) => nodes.map((node) => node.html).join("; ");
      return violations.map(({ id, nodes }) => `${id}: ${htmlOf(nodes)}`);
    });
    assert.deepEqual(violations, [], `axe, ${what}`);
    const overflow = await this.page.evaluate(
      () => document.documentElement.scrollWidth - document.documentElement.clientWidth,
    );
    assert.equal(overflow, 0, `${what}: the page is wider than the window`);
  }

  /** Looks at the page in both sizes and both schemes. Keeps pictures if SCREENSHOTS is set. */
  async isAccessibleEverywhere(what) {
    for (const [width, size] of Object.entries({ wide: WIDE, narrow: NARROW })) {
      for (const scheme of ["light", "dark"]) {
        await this.look({ scheme, size });
        await this.isAccessible(`${what}, ${width}, ${scheme}`);
        if (process.env.SCREENSHOTS !== undefined) {
          const path = join(process.env.SCREENSHOTS, `${what}-${width}-${scheme}.png`);
          await this.page.screenshot({ path });
        }
      }
    }
    await this.look({});
  }
}
