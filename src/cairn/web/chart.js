// Column charts, with their numbers as a table for screen readers.

import { h, svg } from "/web/dom.js";

const HEIGHT = 120;

/** Return a chart. `items`: {label, parts: [[name, value, class]]}; `say` formats a value. */
export function columns(items, say, title) {
  const sums = items.map((one) => one.parts.reduce((sum, [, value]) => sum + value, 0));
  const most = Math.max(...sums, 1e-9);
  const width = 100 / Math.max(items.length, 12);
  const bars = items.flatMap((one, at) => {
    let top = HEIGHT;
    return one.parts
      .filter(([, value]) => value > 0)
      .map(([name, value, kind]) => {
        const height = (value / most) * (HEIGHT - 4);
        top -= height;
        return svg(
          "rect",
          { class: kind, x: `${at * width + width * 0.1}%`, y: top, width: `${width * 0.8}%`, height },
          svg("title", null, `${one.label}, ${name}: ${say(value)}`),
        );
      });
  });
  const names = items[0]?.parts.map(([name]) => name) ?? [];
  return h(
    "figure",
    { class: "chart" },
    h("div", { class: "axis" }, say(most)),
    svg("svg", { width: "100%", height: HEIGHT, role: "img", "aria-label": title }, bars),
    h(
      "div",
      { class: "axis ends" },
      h("span", null, items[0]?.label ?? ""),
      h("span", null, items.at(-1)?.label ?? ""),
    ),
    h(
      "details",
      null,
      h("summary", null, "As a table"),
      h(
        "div",
        { class: "wide", tabindex: 0, role: "group", "aria-label": title },
        h(
          "table",
          null,
          h(
            "thead",
            null,
            h(
              "tr",
              null,
              h("th", { scope: "col" }, "When"),
              names.map((name) => h("th", { scope: "col" }, name)),
            ),
          ),
          h(
            "tbody",
            null,
            items.map((one) =>
              h(
                "tr",
                null,
                h("td", null, one.label),
                one.parts.map(([, value]) => h("td", null, say(value))),
              ),
            ),
          ),
        ),
      ),
    ),
  );
}
