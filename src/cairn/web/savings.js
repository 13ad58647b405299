// The view of savings: tokens that were not computed again, in total, by day and by agent.

import { get } from "/web/api.js";
import { columns } from "/web/chart.js";
import { complain, framed, h, put } from "/web/dom.js";
import { count, percent, seconds, several, short } from "/web/format.js";
import { table } from "/web/now.js";
import { on, store } from "/web/store.js";
import { titleOf } from "/web/titles.js";
import { savedTokens } from "/web/tree.js";

const LISTED = 50;
const DAYS = 60;

export function savingsView() {
  const totals = h("section", { "aria-label": "All together" });
  const chart = h("section", { "aria-labelledby": "h-days" });
  const agents = h("section", { "aria-labelledby": "h-agents" });
  const node = h("div", { class: "page" }, h("h1", null, "Savings"), totals, chart, agents);
  let days = [];
  const drawTotals = framed(() => {
    put(totals, cards(store.savings?.total));
    const today = store.savings?.day;
    if (today) days = [...days.filter((one) => one.day !== today.day), today].sort((a, b) => (a.day < b.day ? -1 : 1));
    put(chart, h("h2", { id: "h-days" }, "Prompt tokens by day"), byDay(days.slice(-DAYS)));
  });
  const drawAgents = framed(() => put(agents, h("h2", { id: "h-agents" }, "By agent"), byAgent()));
  const ends = [on("savings", drawTotals), on("agents", drawAgents)];
  get("/v1/savings")
    .then((found) => {
      days = found.days;
      store.savings ??= { total: found.total, day: null };
      drawTotals();
    })
    .catch((error) => error.status === 401 || complain(error));
  drawTotals();
  drawAgents();
  return { node, end: () => ends.forEach((stop) => stop()) };
}

function cards(total) {
  if (!total) return null;
  const saved = total.pool + total.ram + total.disk + total.shared;
  const all = saved + total.computed;
  return h(
    "dl",
    { class: "cards" },
    [
      ["Tokens not computed again", count(saved)],
      ["of all prompt tokens", all ? percent(saved / all) : "none yet"],
      ["not waited for", seconds(total.seconds_avoided)],
      ["Computed", `${count(total.computed)} in ${seconds(total.prefill_seconds)}`],
      ["Found in the pool", count(total.pool)],
      ["in memory", count(total.ram)],
      ["on the disk", count(total.disk)],
      ["Tokens said", `${count(total.generated)} in ${several(total.requests, "answer")}`],
      ["of them guessed", count(total.guessed)],
    ].map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value))),
  );
}

function byDay(days) {
  if (!days.length) return h("p", { class: "soft" }, "Nothing was asked yet.");
  const legend = h(
    "p",
    { class: "legend" },
    [
      ["pool", "pool"],
      ["ram", "memory"],
      ["disk", "disk"],
      ["computed", "computed"],
    ].map(([name, said]) => h("span", { class: "source" }, h("i", { class: `dot tier-${name}` }), said)),
  );
  return [
    legend,
    columns(
      days.map((one) => ({
        label: one.day,
        parts: [
          ["computed", one.computed, "tier-computed"],
          ["disk", one.disk, "tier-disk"],
          ["memory", one.ram, "tier-ram"],
          ["pool", one.pool, "tier-pool"],
        ],
      })),
      short,
      "Prompt tokens by day and source",
    ),
    table(
      ["Day", "Answers", "Computed", "Not computed again", "Time not waited"],
      days
        .slice(-14)
        .reverse()
        .map((one) => [
          one.day,
          count(one.requests),
          count(one.computed),
          count(one.pool + one.ram + one.disk + one.shared),
          seconds(one.seconds_avoided),
        ]),
    ),
  ];
}

function byAgent() {
  const found = [...store.agents.values()]
    .filter((agent) => agent.savings.requests)
    .sort((a, b) => savedTokens(b) - savedTokens(a));
  if (!found.length) return h("p", { class: "soft" }, "No agent has answered yet.");
  return [
    table(
      ["Agent", "Answers", "Computed", "Not computed again", "Time not waited"],
      found
        .slice(0, LISTED)
        .map((agent) => [
          h("a", { href: `#/contexts/${encodeURIComponent(agent.id)}` }, titleOf(agent)),
          count(agent.savings.requests),
          count(agent.savings.computed),
          count(savedTokens(agent)),
          seconds(agent.savings.seconds_avoided),
        ]),
    ),
    found.length > LISTED && h("p", { class: "soft" }, `and ${count(found.length - LISTED)} more`),
  ];
}
