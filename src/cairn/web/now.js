// The view of present activity: requests, the pool and its stores, the last hour, workers and models.

import { get, post } from "/web/api.js";
import { columns } from "/web/chart.js";
import { button, complain, dialog, field, framed, h, put } from "/web/dom.js";
import { bytes, count, percent, seconds, several } from "/web/format.js";
import { on, store, tell } from "/web/store.js";
import { titleOf } from "/web/titles.js";

export function nowView() {
  const requests = new RequestList();
  const models = h("section", { "aria-labelledby": "h-models" });
  const server = h("div");
  const node = h("div", { class: "page" }, h("h1", null, "Now"), requests.node, models, server);
  const drawRequests = framed(() => requests.draw());
  const drawModels = framed(() => put(models, h("h2", { id: "h-models" }, "Models"), modelTable()));
  const drawServer = framed(() => put(server, figures()));
  let loaded = "";
  const look = () => {
    // a model was loaded or unloaded
    const names = (store.server?.models ?? []).map((one) => one.model).join("\n");
    if (names !== loaded) fetchModels().catch(() => {});
    loaded = names;
  };
  const ends = [
    on("server", look),
    on("requests", drawRequests),
    on("agents", drawRequests),
    on("models", drawModels),
    on("server", drawServer),
    on("hello", drawServer),
  ];
  drawRequests();
  drawModels();
  drawServer();
  return { node, end: () => ends.forEach((stop) => stop()) };
}

// ----------------------------------------------------------------------------------------------------- the requests

const STATES = { waiting: "waits", prefill: "reads its prompt", running: "answers" };

/** The section of requests. A row stays while its request does, so that its button keeps the focus and hears each click. */
class RequestList {
  constructor() {
    this.rows = new Map();
    this.none = h("p", { class: "soft" }, "Nothing runs and nothing waits.");
    this.more = h("p", { class: "soft" });
    this.table = table(["Request", "State", "Prompt", "Said", "For", ""], []);
    this.body = this.table.querySelector("tbody");
    const title = h("h2", { id: "h-requests" }, "Requests");
    this.node = h("section", { "aria-labelledby": "h-requests" }, title, this.none, this.table, this.more);
  }

  draw() {
    const { total, requests } = store.requests;
    this.none.hidden = total > 0;
    this.table.hidden = !total;
    this.more.hidden = total <= requests.length;
    this.more.textContent = `and ${count(total - requests.length)} more`;
    const ids = new Set(requests.map((one) => one.id));
    for (const [id, row] of this.rows) {
      if (ids.has(id)) continue;
      row.remove();
      this.rows.delete(id);
    }
    requests.forEach((one, at) => {
      const row = this.row(one.id);
      cellsOf(one).forEach((cell, column) => {
        const held = row.children[column];
        if (held.textContent !== (cell.textContent ?? cell)) put(held, cell);
      });
      if (this.body.children[at] !== row) this.body.insertBefore(row, this.body.children[at] ?? null);
    });
  }

  row(id) {
    if (!this.rows.has(id)) {
      const cancel = button("Cancel", () => post(`/v1/requests/${id}/cancel`).catch(complain), {
        class: "small",
        "aria-label": `Cancel request ${id}`,
      });
      this.rows.set(id, h("tr", null, Array.from({ length: 5 }, () => h("td")), h("td", null, cancel)));
    }
    return this.rows.get(id);
  }
}

/** Return what is told of a request, for the cells of its row. */
function cellsOf(one) {
  const prompt = count(one.prompt_tokens);
  const agent = one.agent && (store.agents.get(one.agent) ?? { id: one.agent });
  return [
    agent ? h("a", { href: `#/chat/${encodeURIComponent(one.agent)}` }, titleOf(agent)) : h("code", null, one.id),
    STATES[one.state],
    one.cached_tokens === null ? prompt : `${prompt}, ${count(one.cached_tokens)} cached`,
    count(one.completion_tokens),
    seconds(one.seconds),
  ];
}

export function table(heads, lines) {
  return h(
    "div",
    { class: "wide", tabindex: 0, role: "group", "aria-label": `Table: ${heads[0]}` },
    h(
      "table",
      null,
      h(
        "thead",
        null,
        h(
          "tr",
          null,
          heads.map((one) => (one ? h("th", { scope: "col" }, one) : h("td"))),
        ),
      ),
      h(
        "tbody",
        null,
        lines.map((line) =>
          h(
            "tr",
            null,
            line.map((cell) => h("td", null, cell)),
          ),
        ),
      ),
    ),
  );
}

// ------------------------------------------------------------------------------------------------------- the models

/** Return the table of models. The server reports a state for those that can be loaded. */
export async function fetchModels() {
  store.models = (await get("/v1/models")).data;
  tell("models");
}

function modelTable() {
  const canChange = Boolean(store.hello?.server);
  const states = store.models.some((one) => one.state !== undefined);
  return table(
    ["Model", "Kind", "Context", ...(states ? ["State", ""] : [])],
    store.models.map((one) => [
      one.id,
      one.kind ?? "",
      one.max_model_len ? `${count(one.max_model_len)} tokens` : "",
      ...(states ? [one.state ?? "", canChange && one.state ? modelActions(one) : ""] : []),
    ]),
  );
}

function modelActions(one) {
  const order = async (what, body) => {
    let fine = true;
    try {
      const done = post(`/v1/admin/models/${what}`, { model: one.id, ...body }, { admin: true });
      setTimeout(() => fetchModels().catch(() => {}), 300); // it takes its time: the state says so
      await done;
    } catch (error) {
      fine = false;
      complain(error);
    }
    await fetchModels().catch(() => {});
    return fine;
  };
  const act = (text, f) => button(text, f, { class: "small", "aria-label": `${text} ${one.id}` });
  if (one.state === "loaded") return [act("Unload", () => order("unload")), " ", act("Swap", () => swap(one, order))];
  return one.state === "loading" || one.state === "unloading" ? "" : act("Load", () => order("load"));
}

function swap(one, order) {
  const others = store.models.filter((other) => other.id !== one.id).map((other) => other.id);
  const to = h("input", { type: "text" });
  const typed = field("Its folder, file or name", to);
  const list = h(
    "select",
    {
      onchange: () => {
        typed.hidden = Boolean(list.value);
      },
    },
    others.map((other) => h("option", { value: other }, other)),
    h("option", { value: "" }, "another …"),
  );
  typed.hidden = others.length > 0;
  const go = h("button", { type: "submit", class: "primary" }, "Swap");
  dialog("Swap", (close) =>
    h(
      "form",
      {
        onsubmit: async (event) => {
          event.preventDefault();
          const chosen = list.value || to.value.trim();
          if (!chosen) return;
          go.disabled = true;
          go.textContent = "Loading …";
          if (await order("swap", { to: chosen })) close(); // what is refused can be corrected here
          go.disabled = false;
          go.textContent = "Swap";
        },
      },
      h("p", null, `Another model answers in the name of ${one.id}, once it is loaded.`),
      field("The other", list),
      typed,
      h(
        "div",
        { class: "row end" },
        button("Cancel", close),
        go,
      ),
    ),
  );
  (others.length ? list : to).focus();
}

// ------------------------------------------------------------------------------------------------- the whole server

function meter(name, part, text, kind) {
  return h(
    "div",
    { class: "meter" },
    h("span", null, name),
    h(
      "span",
      { class: "track", "aria-hidden": "true" },
      h("span", { class: kind, style: { width: `${Math.min(100, 100 * part)}%` } }),
    ),
    h("span", null, text),
  );
}

function figures() {
  if (!store.hello) return null;
  if (!store.hello.server) {
    return h(
      "section",
      null,
      h("h2", null, "Server"),
      h("p", { class: "soft" }, "Figures of the whole server need its admin key: give it under Keys."),
    );
  }
  if (!store.server) return null;
  return [store.server.troubles.map((one) => h("p", { class: "warn" }, one)), store.server.models.map(modelFigures)];
}

function modelFigures(one) {
  const { kv } = one;
  const tier = (name, stats, kind) =>
    stats &&
    meter(
      name,
      stats.budget ? stats.bytes / stats.budget : 0,
      `${bytes(stats.bytes)} of ${bytes(stats.budget)}, ${several(stats.chunks, "chunk")}` +
        (stats.pinned ? `, ${count(stats.pinned)} pinned` : ""),
      kind,
    );
  const disk = kv.disk;
  const minutes = one.minutes;
  const answered = minutes.reduce((sum, minute) => sum + minute.answers, 0);
  const waited = minutes.reduce((sum, minute) => sum + minute.first_token, 0);
  const time = (minute) =>
    new Date(1000 * minute.at).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
  return h(
    "section",
    { "aria-label": one.model },
    h("h2", null, one.model),
    one.troubles.map((text) => h("p", { class: "warn" }, text)),
    meter(
      "Pool",
      one.pool_used,
      `${percent(one.pool_used)} held by requests; room for ${count(one.pool_tokens)} tokens`,
      "tier-pool",
    ),
    tier("Memory", kv.ram, "tier-ram"),
    tier("Disk", disk, "tier-disk"),
    disk
      ? h(
          "p",
          { class: "soft" },
          `Disk: ${bytes(disk.written)} written and ${bytes(disk.read)} read by this worker, ${count(disk.evicted)} chunks evicted, ` +
            `${count(disk.damaged)} damaged; ${count(kv.queued)} wait to be written, ${count(kv.deferred)} deferred by the day's budget.`,
        )
      : h("p", { class: "soft" }, "No KV is stored on the disk."),
    h(
      "dl",
      { class: "inline" },
      [
        ["Running", count(one.running)],
        ["Waiting", count(one.waiting)],
        ["Generated", `${count(one.tokens.generated)} tokens`],
        ["Guessed ahead", `${count(one.tokens.guessed)} tokens of ${count(one.tokens.guesses)} guesses`],
        ["Prompts", `${count(one.tokens.prompt)} tokens, ${count(one.tokens.cached)} cached`],
        [
          "First token",
          one.first_token.answers
            ? `${seconds(one.first_token.seconds / one.first_token.answers)} on average`
            : "none yet",
        ],
        [
          "Last hour",
          answered ? `${several(answered, "answer")}, first token after ${seconds(waited / answered)}` : "no answers",
        ],
        [
          "Worker",
          one.worker.pid
            ? `process ${one.worker.pid}, replaced ${several(one.worker.restarts, "time")}`
            : "is being replaced",
        ],
      ].map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value))),
    ),
    minutes.length > 1 && [
      h("h3", null, "Tokens a second, last hour"),
      columns(
        minutes.map((minute) => ({ label: time(minute), parts: [["generated", minute.generated / 60, "tier-pool"]] })),
        (n) => n.toFixed(1),
        "Tokens a second",
      ),
      h("h3", null, "Seconds to the first token, last hour"),
      columns(
        minutes.map((minute) => ({
          label: time(minute),
          parts: [["mean", minute.answers ? minute.first_token / minute.answers : 0, "tier-disk"]],
        })),
        seconds,
        "Seconds to the first token",
      ),
    ],
  );
}
