// Markdown rendered as DOM nodes. No part of a text ever becomes HTML: unknown syntax stays text.
//
// Supported: paragraphs, headings, lists and tasks, quotes, code blocks and spans, tables, rules, emphasis, links to http, https
// and mailto. Images are shown as links, because the page requests nothing from other hosts.

import { button, h } from "/web/dom.js";

const LONGEST = 60000; // characters of a block that are shown unasked
const DEEPEST = 8;
const SCHEMES = new Set(["http:", "https:", "mailto:"]);

/** Return a heading's text without the signs that close it. A pattern would look at each blank for all that follow it. */
function withoutClosing(heading) {
  const text = heading.trimEnd();
  let end = text.length;
  while (text[end - 1] === "#") end--;
  return end === 0 || /\s/.test(text[end - 1]) ? text.slice(0, end).trimEnd() : text;
}

/** Return a text's blocks, {kind, text, ...}, each with the offset `start`. */
export function blocks(text) {
  const found = [];
  let at = 0;
  const lineAt = (from) => {
    const end = text.indexOf("\n", from);
    return end < 0 ? text.length : end;
  };
  const line = () => text.slice(at, lineAt(at));
  const next = () => {
    at = lineAt(at) + 1;
  };
  while (at < text.length) {
    const start = at;
    const here = line();
    if (!here.trim()) {
      next();
      continue;
    }
    const fence = /^( {0,3})(`{3,}(?=[^`]*$)|~{3,})\s*([\w+#.-]{0,40})/.exec(here);
    if (fence) {
      const [, blanks, marks, language] = fence;
      next();
      const from = at;
      let end = -1;
      while (at < text.length) {
        const one = line().trim();
        if (one.startsWith(marks) && one.replaceAll(marks[0], "") === "") {
          end = at;
          next();
          break;
        }
        next();
      }
      let body = text.slice(from, end < 0 ? text.length : end).replace(/\n$/, "");
      if (blanks) body = body.replace(new RegExp(`^ {1,${blanks.length}}`, "gm"), "");
      found.push({ kind: "code", start, text: body, language, closed: end >= 0 });
      continue;
    }
    const heading = /^ {0,3}(#{1,6})\s+(.*)$/.exec(here);
    if (heading) {
      found.push({ kind: "heading", start, level: heading[1].length, text: withoutClosing(heading[2]) });
      next();
      continue;
    }
    if (/^ {0,3}([-*_])( *\1){2,} *$/.test(here)) {
      found.push({ kind: "rule", start });
      next();
      continue;
    }
    if (/^ {0,3}>/.test(here)) {
      const lines = [];
      while (at < text.length && /^ {0,3}>/.test(line())) {
        lines.push(line().replace(/^ {0,3}> ?/, ""));
        next();
      }
      found.push({ kind: "quote", start, text: lines.join("\n") });
      continue;
    }
    if (item(here)) {
      found.push({ kind: "list", start, ...list() });
      continue;
    }
    if (tableHere()) {
      const rows = [];
      while (at < text.length && line().includes("|")) {
        rows.push(cells(line()));
        next();
      }
      found.push({ kind: "table", start, head: rows[0], rows: rows.slice(2), sides: rows[1].map(side) });
      continue;
    }
    const lines = [];
    while (at < text.length) {
      const one = line();
      if (!one.trim() || (lines.length && /^ {0,3}(#{1,6}\s|>|`{3,}|~{3,}|[-*+] |1[.)] )/.test(one))) break;
      if (lines.length && tableHere()) break;
      lines.push(one.trimEnd());
      next();
    }
    found.push({ kind: "paragraph", start, text: lines.join("\n") });
  }
  return found;

  function tableHere() {
    if (!line().includes("|")) return false;
    const under = text.slice(lineAt(at) + 1, lineAt(lineAt(at) + 1));
    return /^[\s|:-]+$/.test(under) && under.includes("-") && under.includes("|");
  }

  function list() {
    const first = item(line());
    const items = [];
    let width = 0; // blanks that the item's other lines begin with: where its text begins, or less
    let known = false;
    while (at < text.length) {
      const one = line();
      const mark = item(one);
      if (mark && mark.indent <= first.indent + 1) {
        if (mark.ordered !== first.ordered) break;
        items.push([mark.text]);
        [width, known] = [mark.width, false];
        next();
      } else if (!one.trim()) {
        const after = text.slice(lineAt(at) + 1, lineAt(lineAt(at) + 1));
        const goesOn = item(after) || /^\s{2,}\S/.test(after);
        if (!goesOn) break;
        items.at(-1).push("");
        next();
      } else if (/^\s{2,}/.test(one) || !/^ {0,3}(#{1,6}\s|>|`{3,}|~{3,})/.test(one)) {
        const blanks = /^ */.exec(one)[0].length;
        if (blanks && !known) [width, known] = [Math.min(width, blanks), true];
        items.at(-1).push(one[0] === "\t" ? one.slice(1) : one.slice(Math.min(width, blanks)));
        next();
      } else break;
    }
    return { ordered: first.ordered, first: first.number, items: items.map((lines) => lines.join("\n")) };
  }
}

function item(line) {
  const found = /^( *)([-*+]|(\d{1,9})[.)])(?: +|$)(.*)$/.exec(line);
  if (!found) return null;
  const [, before, mark, number, text] = found;
  return {
    indent: before.length,
    width: text ? line.length - text.length : before.length + mark.length + 1,
    ordered: number !== undefined,
    number: Number(number ?? 1),
    text,
  };
}

/** Return a column's alignment from the marks below its heading. */
function side(mark) {
  if (/^:-+:$/.test(mark)) return "center";
  return /^-+:$/.test(mark) ? "right" : "left";
}

function cells(line) {
  const parts = line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|");
  return parts.slice(0, 40).map((one) => one.trim());
}

/** Return a link's URL if it is allowed, else null. */
export function safe(address) {
  try {
    const url = new URL(address);
    return SCHEMES.has(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

/** Return the nodes of inline text. */
export function inline(text, depth = 0) {
  const found = [];
  const none = new Set(); // marks that no other closes: looked for once
  let from = 0;
  let at = 0;
  const flush = (end) => {
    if (end > from) found.push(text.slice(from, end));
  };
  const close = (mark, start) => {
    if (none.has(mark)) return -1;
    const end = text.indexOf(mark, start);
    if (end < 0) none.add(mark);
    return end;
  };
  const take = (node, end) => {
    flush(at);
    found.push(node);
    from = at = end;
  };
  const wrapped = (mark, tag) => {
    const end = close(mark, at + mark.length);
    if (end <= at + mark.length || depth >= DEEPEST) return false;
    const inner = text.slice(at + mark.length, end);
    if (/^\s|\s$/.test(inner)) return false;
    take(h(tag, null, inline(inner, depth + 1)), end + mark.length);
    return true;
  };
  while (at < text.length) {
    const char = text[at];
    if (char === "\\" && /[\\`*_{}[\]()#+.!|~<>-]/.test(text[at + 1] ?? "")) {
      flush(at);
      found.push(text[at + 1]);
      from = at = at + 2;
    } else if (char === "`") {
      let marks = 1;
      while (text[at + marks] === "`") marks++;
      const mark = "`".repeat(Math.min(marks, 64));
      const end = close(mark, at + marks);
      if (end < 0) at += marks;
      else take(h("code", null, text.slice(at + marks, end).replace(/^ (.*) $/s, "$1")), end + mark.length);
    } else if (char === "*" || char === "_") {
      const word = char === "_" && /\w/.test(text[at - 1] ?? "");
      const twice = text[at + 1] === char;
      if (word || !(twice ? wrapped(char + char, "strong") : wrapped(char, "em"))) at += twice ? 2 : 1;
    } else if (char === "~" && text[at + 1] === "~") {
      if (!wrapped("~~", "del")) at += 2;
    } else if (char === "[" || (char === "!" && text[at + 1] === "[")) {
      if (!linked(at + (char === "!" ? 2 : 1))) at++;
    } else if (char === "h" && /^https?:\/\//.test(text.slice(at, at + 8)) && !/\w/.test(text[at - 1] ?? "")) {
      const address = /^[^\s<>"'`*|]{1,2000}/.exec(text.slice(at, at + 2000))[0].replace(/[.,;:!?)\]]+$/, "");
      const url = safe(address);
      if (url) take(anchor(url, [address]), at + address.length);
      else at++;
    } else if (char === "\n") {
      take(h("br"), at + 1);
    } else at++;
  }
  flush(at);
  return found;

  function linked(start) {
    const middle = start + text.slice(start, start + 1000).indexOf("](");
    if (middle < start || depth >= DEEPEST) return false;
    const end = middle + text.slice(middle, middle + 2000).indexOf(")");
    if (end < middle) return false;
    const address = text
      .slice(middle + 2, end)
      .trim()
      .split(/\s/)[0];
    const label = inline(text.slice(start, middle), DEEPEST - 1);
    const url = safe(address);
    // A link that is not allowed is shown as its source text.
    take(url ? anchor(url, label.length ? label : [address]) : h("span", null, label, ` (${address})`), end + 1);
    return true;
  }
}

const anchor = (url, label) => h("a", { href: url, rel: "noopener noreferrer nofollow", target: "_blank" }, label);

/** Copy a text to the clipboard; over plain HTTP from another machine only execCommand works. */
async function copied(text) {
  if (navigator.clipboard)
    return navigator.clipboard.writeText(text).then(
      () => true,
      () => false,
    );
  const field = h("textarea", { class: "hidden", value: text });
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}

/** Copy a text and confirm it for a moment on the button. */
export function copier(text) {
  const node = button(
    "Copy",
    async () => {
      node.textContent = (await copied(typeof text === "function" ? text() : text)) ? "Copied" : "Not copied";
      setTimeout(() => {
        node.textContent = "Copy";
      }, 1500);
    },
    { class: "quiet small" },
  );
  return node;
}

/** Return a text's node; of a very long text the beginning, with a button for the rest. */
function bounded(text, make) {
  if (text.length <= LONGEST) return make(text);
  const box = h("div", null, make(text.slice(0, LONGEST)));
  const rest = text.length - LONGEST;
  box.append(
    button(`Show ${rest.toLocaleString("en")} more characters`, () =>
      box.replaceChildren(h("pre", { class: "plain" }, text)),
    ),
  );
  return box;
}

/** Return the node of a block. */
export function block(one, depth = 0) {
  switch (one.kind) {
    case "code":
      return h(
        "figure",
        { class: "code" },
        h("figcaption", null, h("span", null, one.language || "text"), copier(one.text)),
        bounded(one.text, (text) => h("pre", { tabindex: 0 }, h("code", null, text))),
      );
    case "heading":
      return h(`h${Math.min(6, one.level + 1)}`, null, inline(one.text.slice(0, 2000)));
    case "rule":
      return h("hr");
    case "quote":
      return h("blockquote", null, depth < DEEPEST ? nodes(one.text, depth + 1) : one.text);
    case "list":
      return h(
        one.ordered ? "ol" : "ul",
        one.ordered && one.first !== 1 ? { start: one.first } : null,
        one.items.map((text) => listItem(text, depth)),
      );
    case "table":
      return h(
        "div",
        { class: "wide", tabindex: 0, role: "group", "aria-label": "Table" },
        h(
          "table",
          null,
          h(
            "thead",
            null,
            h(
              "tr",
              null,
              one.head.map((cell, at) => h("th", { scope: "col", class: one.sides[at] }, inline(cell))),
            ),
          ),
          h(
            "tbody",
            null,
            one.rows.map((row) =>
              h(
                "tr",
                null,
                row.map((cell, at) => h("td", { class: one.sides[at] }, inline(cell))),
              ),
            ),
          ),
        ),
      );
    default:
      return bounded(one.text, (text) => h("p", null, inline(text)));
  }
}

/** Return a list item; [ ] or [x] at its beginning becomes a disabled checkbox. */
function listItem(text, depth) {
  const task = /^\[([ xX])\]\s+/.exec(text);
  if (!task) return h("li", null, tight(text, depth));
  const done = task[1] !== " ";
  const box = h("input", { type: "checkbox", disabled: true, checked: done, "aria-label": done ? "done" : "to do" });
  return h("li", { class: "task" }, box, tight(text.slice(task[0].length), depth));
}

function tight(text, depth) {
  if (depth >= DEEPEST) return text;
  const found = blocks(text);
  if (found.length === 1 && found[0].kind === "paragraph") return inline(found[0].text);
  if (found[0]?.kind === "paragraph")
    return [inline(found[0].text), found.slice(1).map((one) => block(one, depth + 1))];
  return found.map((one) => block(one, depth + 1));
}

/** Return the nodes of a Markdown text. */
export const nodes = (text, depth = 0) => blocks(text).map((one) => block(one, depth));

/** The view of a growing text: complete blocks are rendered once. */
export class Growing {
  constructor(node) {
    this.node = node;
    this.text = "";
    this.from = 0; // where the last block begins, which is made again
    this.last = [];
  }

  show(text) {
    if (text === this.text) return;
    if (!text.startsWith(this.text.slice(0, this.from))) {
      this.from = 0;
      this.last = [];
      this.node.replaceChildren();
    }
    this.text = text;
    const found = blocks(text.slice(this.from));
    for (const one of this.last) one.remove();
    const made = found.map((one) => block(one));
    this.node.append(...made);
    this.last = made.slice(-1);
    if (found.length) this.from += found.at(-1).start;
  }
}
