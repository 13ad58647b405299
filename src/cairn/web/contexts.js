// The view of all contexts as a tree: agents, their turns, and where their KV is.

import { agentPath, ask, get, post, remove } from "/web/api.js";
import { textOf } from "/web/answer.js";
import { colour, MODES } from "/web/colours.js";
import { facts, turnFacts } from "/web/details.js";
import { button, complain, dialog, field, framed, h, put, say, sure } from "/web/dom.js";
import { ago, count, several, short } from "/web/format.js";
import { dropped, on, store, took } from "/web/store.js";
import { titleOf } from "/web/titles.js";
import { rows, savedTokens } from "/web/tree.js";
import { VirtualList } from "/web/virtual.js";

const ROW = 34;
const ASKED_AT_ONCE = 3;
const KEPT = 2000; // agents of which it is remembered where their KV lies
const FRESH = 15000; // milliseconds for which that is believed while figures of the tiers move

export function contextsView(id) {
  const view = new Contexts(id);
  return { node: view.node, end: () => view.end() };
}

class Contexts {
  constructor(id) {
    this.open = new Set();
    this.turns = new Map();
    this.loading = new Set();
    this.kv = new Map(); // id -> {mark, kv, at}
    this.asking = 0;
    this.rows = [];
    this.selected = id || "";
    this.mode = "tier";
    this.order = "created";
    this.build();
    this.redraw = framed(() => this.refresh());
    this.ends = [on("agents", this.redraw), on("link", this.redraw)];
    this.asked = id; // opened as soon as it is known
    this.refresh();
  }

  end() {
    this.ended = true;
    for (const stop of this.ends) stop();
    this.list.end();
  }

  build() {
    this.search = h("input", {
      type: "search",
      placeholder: "Search names and metadata  ( / )",
      "aria-label": "Search contexts",
      oninput: () => {
        this.box.scrollTop = 0;
        this.redraw();
      },
      onkeydown: (event) => {
        if (event.key === "Escape") {
          this.search.value = "";
          this.redraw();
          this.box.focus();
        } else if (event.key === "ArrowDown") {
          event.preventDefault();
          this.box.focus();
        }
      },
    });
    const choose = (label, options, f) =>
      field(
        label,
        h(
          "select",
          {
            onchange: (event) => {
              f(event.target.value);
              this.redraw();
            },
          },
          Object.entries(options).map(([value, text]) => h("option", { value }, text)),
        ),
      );
    const file = h("input", {
      type: "file",
      accept: ".cairn",
      class: "hidden",
      "aria-label": "File of an agent",
      tabindex: -1,
      onchange: () => this.bring(file),
    });
    this.total = h("span", { class: "soft", role: "status" });
    const bar = h(
      "div",
      { class: "toolbar", role: "group", "aria-label": "Tree" },
      this.search,
      choose("Colour", MODES, (value) => {
        this.mode = value;
      }),
      choose(
        "Order",
        { created: "Newest first", used: "Last used", size: "Largest", saved: "Most saved", name: "Name" },
        (value) => {
          this.order = value;
        },
      ),
      button("Import", () => file.click()),
      file,
      this.total,
    );
    this.box = h("div", {
      class: "tree",
      role: "tree",
      tabindex: 0,
      "aria-label": "Contexts",
      onkeydown: (e) => this.key(e),
      onclick: (e) => this.click(e),
      ondblclick: (e) => this.click(e, true),
    });
    this.list = new VirtualList(this.box, ROW, (row, at) => this.rowNode(row, at));
    this.list.ondrawn = (first, last) => this.ask(first, last);
    this.detail = h("section", { class: "detail", "aria-label": "Selected" });
    this.node = h("div", { class: "contexts" }, h("h1", { class: "hidden" }, "Contexts"), bar, this.box, this.detail);
    this.keys = (event) => {
      if (event.key === "/" && !/INPUT|TEXTAREA|SELECT/.test(event.target.tagName)) {
        event.preventDefault();
        this.search.focus();
      }
    };
    document.addEventListener("keydown", this.keys);
    const end = this.end;
    this.end = () => {
      document.removeEventListener("keydown", this.keys);
      end.call(this);
    };
  }

  // --------------------------------------------------------------------------------------------------- what is shown

  refresh() {
    if (this.ended) return;
    if (this.asked && store.agents.has(this.asked)) {
      const id = this.asked;
      this.asked = "";
      this.expand(id);
      this.refresh();
      this.select(id, true);
      return;
    }
    for (const id of this.open) {
      const agent = store.agents.get(id);
      if (!agent) this.open.delete(id);
      else if (this.turns.get(id)?.mark !== markOf(agent)) this.loadTurns(id);
    }
    const turns = new Map([...this.turns].map(([id, one]) => [id, one.turns]));
    this.rows = rows(store.agents, {
      open: this.open,
      turns,
      wanted: this.search.value.trim().toLowerCase(),
      order: this.order,
    });
    this.at = this.rows.findIndex((row) => row.key === this.selected);
    this.list.show(this.rows);
    const shown = this.search.value ? `${count(this.rows.filter((row) => row.kind === "agent").length)} of ` : "";
    this.total.textContent = shown + several(store.agents.size, "agent");
    this.showDetail();
  }

  rowNode(row, at) {
    const { agent, turn } = row;
    const node = h("div", {
      class: `node ${row.kind}`,
      role: "treeitem",
      id: `row-${at}`,
      "data-at": at,
      "aria-level": row.depth + 1,
      "aria-posinset": row.at,
      "aria-setsize": row.of,
      "aria-selected": at === this.at ? "true" : "false",
      "aria-expanded": row.kind === "agent" ? String(row.open) : null,
    });
    const indent = h("span", { style: { width: `${Math.min(row.depth, 12) * 18}px` } });
    if (row.kind === "note") {
      node.append(indent, h("span", { class: "soft" }, row.text));
      return node;
    }
    const { className, word } = colour(this.mode, row, this.kv.get(agent.id)?.kv, Date.now() / 1000);
    const chip = h("span", { class: `chip ${className}` }, word);
    if (row.kind === "agent") {
      node.append(
        indent,
        h("span", { class: "twisty", "aria-hidden": "true" }),
        chip,
        h("span", { class: "name" }, titleOf(agent)),
        agent.origin ? h("span", { class: "soft opt" }, agent.id) : "",
        agent.pinned ? h("span", { class: "tag" }, "pinned") : "",
        agent.state !== "idle" ? h("span", { class: `tag ${agent.state}` }, agent.state) : "",
        h("span", { class: "grow" }),
        h("span", { class: "cell" }, several(agent.turns, "turn")),
        h("span", { class: "cell" }, `${short(agent.tokens)} tokens`),
        h("span", { class: "cell opt" }, `${short(savedTokens(agent))} saved`),
        h("span", { class: "cell opt" }, ago(agent.last_used)),
      );
    } else {
      const text = turn.messages.map(textOf).join(" ").slice(0, 200) || "(no text)";
      node.append(
        indent,
        chip,
        h("span", { class: "number" }, `${turn.number}`),
        h("span", { class: "name" }, text),
        turn.current ? "" : h("span", { class: "tag" }, "left"),
        turn.state !== "finished" ? h("span", { class: `tag ${turn.state}` }, turn.state) : "",
        h("span", { class: "grow" }),
        h("span", { class: "cell" }, `${short(turn.completion_tokens)} said`),
        h("span", { class: "cell opt" }, ago(turn.began)),
      );
    }
    return node;
  }

  async loadTurns(id) {
    if (this.loading.has(id)) return;
    this.loading.add(id);
    const mark = markOf(store.agents.get(id));
    try {
      const found = [];
      for (let after = 0; after !== null;) {
        const page = await get(agentPath(id, `turns?limit=100&after=${after}`));
        found.push(...page.data);
        after = page.next;
      }
      const ends = new Map(found.map((turn) => [turn.number, turn.prompt_tokens + turn.completion_tokens]));
      for (const turn of found) turn.start = ends.get(turn.parent) ?? 0;
      this.turns.set(id, { mark, turns: found });
    } catch (error) {
      this.turns.set(id, { mark, turns: [] });
      if (error.status !== 404) complain(error);
    } finally {
      this.loading.delete(id);
      this.redraw();
    }
  }

  /** Read where the KV of the visible agents is, a few requests at a time. */
  ask(first, last) {
    this.sight = [first, last];
    this.askNext();
  }

  askNext() {
    if (this.ended || store.link !== "live" || this.mode !== "tier") return;
    const [first, last] = this.sight ?? [0, 0];
    for (let at = first; at < Math.min(last, this.rows.length) && this.asking < ASKED_AT_ONCE; at++) {
      const { agent } = this.rows[at];
      if (agent.tokens && agent.state !== "running" && this.stale(agent)) this.where(agent);
    }
  }

  stale(agent) {
    const known = this.kv.get(agent.id);
    return (
      !known ||
      (known.mark !== markOf(agent) && Date.now() - known.at > 1000) ||
      (agent.id === this.current()?.agent.id && Date.now() - known.at > FRESH)
    );
  }

  async where(agent) {
    this.asking++;
    this.kv.set(agent.id, { ...this.kv.get(agent.id), mark: markOf(agent), at: Date.now() });
    try {
      const found = await get(agentPath(agent.id));
      this.know(agent, found.kv);
    } catch {
      /* shown as unknown */
    } finally {
      this.asking--;
      this.list.draw();
    }
  }

  know(agent, kv) {
    this.kv.delete(agent.id);
    this.kv.set(agent.id, { mark: markOf(agent), kv, at: Date.now() });
    if (this.kv.size > KEPT) this.kv.delete(this.kv.keys().next().value);
    this.list.draw();
    this.showDetail();
  }

  // --------------------------------------------------------------------------------------------------- what is done

  current() {
    return this.rows[this.at];
  }

  select(key, reveal) {
    this.selected = key;
    this.at = this.rows.findIndex((row) => row.key === key);
    if (this.at >= 0) {
      this.box.setAttribute("aria-activedescendant", `row-${this.at}`);
      if (reveal) this.list.reveal(this.at);
    } else this.box.removeAttribute("aria-activedescendant");
    this.list.draw();
    this.showDetail();
  }

  click(event, twice) {
    const node = event.target.closest(".node");
    if (!node) return;
    const row = this.rows[Number(node.dataset.at)];
    if (!row) return;
    this.select(row.key);
    if (row.kind === "agent" && (twice || event.target.classList.contains("twisty"))) this.toggle(row);
  }

  toggle(row, open = !row.open) {
    if (row.kind !== "agent") return;
    if (open) this.expand(row.agent.id);
    else this.open.delete(row.agent.id);
    this.refresh();
  }

  expand(id) {
    this.open.add(id);
    for (
      let agent = store.agents.get(id), n = 0;
      agent?.origin && n < 100;
      agent = store.agents.get(agent.origin), n++
    ) {
      if (store.agents.has(agent.origin)) this.open.add(agent.origin);
    }
  }

  key(event) {
    const row = this.current();
    const move = { ArrowDown: 1, ArrowUp: -1, PageDown: 15, PageUp: -15, Home: -1e9, End: 1e9 }[event.key];
    if (move !== undefined) {
      event.preventDefault();
      const at = Math.max(0, Math.min(this.rows.length - 1, (this.at < 0 ? -1 : this.at) + move));
      if (this.rows[at]) this.select(this.rows[at].key, true);
      return;
    }
    if (!row || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "ArrowRight" || event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      if (row.kind === "agent" && (!row.open || event.key !== "ArrowRight")) this.toggle(row);
      else if (event.key === "ArrowRight" && this.rows[this.at + 1]?.depth > row.depth)
        this.select(this.rows[this.at + 1].key, true);
    } else if (event.key === "ArrowLeft") {
      event.preventDefault();
      if (row.kind === "agent" && row.open) this.toggle(row, false);
      else
        for (let at = this.at - 1; at >= 0; at--)
          if (this.rows[at].depth < row.depth) {
            this.select(this.rows[at].key, true);
            break;
          }
    } else {
      const act = this.actions(row).find(([, key]) => key === event.key);
      if (act && !act[3]?.disabled) {
        event.preventDefault();
        act[2]();
      }
    }
  }

  /** Return the actions of a row: [name, key, f, more]. */
  actions(row) {
    const { agent, turn } = row;
    const doing = (name, f) => async () => {
      try {
        await f();
        say(`${name}: done.`);
      } catch (error) {
        complain(error);
      }
    };
    const to = (rest, body, then) => doing(rest, async () => then(await post(agentPath(agent.id, rest), body)));
    const placed = (answer) => this.know(store.agents.get(agent.id) ?? agent, answer.kv);
    const all = [
      [
        "Open the chat",
        "o",
        () => {
          location.hash = `#/chat/${encodeURIComponent(agent.id)}`;
        },
      ],
      agent.pinned ? ["Unpin", "p", to("unpin", {}, took)] : ["Pin", "p", to("pin", {}, took)],
      ["Fork", "f", () => this.fork(agent, turn)],
      turn
        ? ["Roll back to here", "r", to("rollback", { turn: turn.number }, took)]
        : ["Roll back a turn", "r", () => this.back(agent)],
      ["Prefetch", "l", to("prefetch", {}, placed)],
      ["Evict from memory", "e", to("evict", {}, placed)],
      [
        "Evict from the disk too",
        "E",
        to("evict", { disk: true }, placed),
        { disabled: agent.pinned, title: agent.pinned ? "Unpin it first" : null },
      ],
      ["Export", "x", doing("Export", () => this.export(agent))],
      ["Delete", "Delete", () => this.delete(agent), { class: "danger" }],
    ];
    return all;
  }

  fork(agent, turn) {
    const name = h("input", {
      type: "text",
      placeholder: "drawn by the server",
      pattern: "[A-Za-z0-9][A-Za-z0-9._\\-]{0,63}",
    });
    dialog("Fork", (close) => [
      h(
        "p",
        null,
        `A new agent that shares ${turn ? `turns 1 to ${turn.number}` : "all turns"} of ${titleOf(agent)}. Nothing is copied.`,
      ),
      field("Name", name),
      h(
        "div",
        { class: "row end" },
        button("Cancel", close),
        button(
          "Fork",
          async () => {
            try {
              const made = await post(agentPath(agent.id, "fork"), {
                ...(turn ? { turn: turn.number } : {}),
                ...(name.value ? { id: name.value } : {}),
              });
              close();
              took(made);
              this.expand(made.id);
              this.refresh();
              this.select(made.id, true);
            } catch (error) {
              complain(error);
            }
          },
          { class: "primary" },
        ),
      ),
    ]);
    name.focus();
  }

  async back(agent) {
    try {
      const page = await get(agentPath(agent.id, `turns?limit=1&after=${agent.head - 1}`));
      const head = page.data.find((turn) => turn.number === agent.head);
      if (head) took(await post(agentPath(agent.id, "rollback"), { turn: head.parent }));
    } catch (error) {
      complain(error);
    }
  }

  async export(agent) {
    const response = await ask("GET", agentPath(agent.id, "export"));
    const url = URL.createObjectURL(await response.blob());
    const link = h("a", { href: url, download: `${agent.id}.cairn` });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  }

  async bring(file) {
    const [given] = file.files;
    file.value = "";
    if (!given) return;
    try {
      const response = await ask("POST", "/v1/agents/import", given, {
        raw: true,
        headers: { "Content-Type": "application/octet-stream" },
      });
      const made = await response.json();
      took(made);
      this.refresh();
      this.select(made.id, true);
    } catch (error) {
      complain(error);
    }
  }

  async delete(agent) {
    const yes = await sure(
      "Delete",
      `${titleOf(agent)}: its text and its KV go from the disk, and cannot be brought back. What forks share stays with them.`,
      "Delete it",
    );
    if (!yes) return;
    try {
      await remove(agentPath(agent.id));
      const at = this.at;
      dropped(agent.id);
      this.refresh();
      const next = this.rows[Math.min(at, this.rows.length - 1)];
      if (next) this.select(next.key);
      this.box.focus();
      say("It is deleted.");
    } catch (error) {
      complain(error);
    }
  }

  // --------------------------------------------------------------------------------------------------- the selected

  showDetail() {
    const row = this.current();
    if (!row || row.kind === "note") {
      if (this.shown === "") return;
      this.shown = "";
      const empty = store.agents.size
        ? "Select a context. Arrow keys move and open, / searches."
        : "There are no agents yet. A chat makes one.";
      put(this.detail, h("p", { class: "soft" }, empty));
      return;
    }
    const { agent, turn } = row;
    const known = this.kv.get(agent.id)?.kv;
    const shown = JSON.stringify([row.key, agent, turn?.state, known]);
    if (shown === this.shown) return; // what has the focus keeps it
    this.shown = shown;
    const focus = this.detail.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    const actions = this.actions(row).map(([name, key, f, more]) =>
      button([name, h("kbd", null, key === "Delete" ? "Del" : key)], f, { "data-key": key, ...more }),
    );
    put(
      this.detail,
      h("h2", null, turn ? `Turn ${turn.number} of ${titleOf(agent)}` : titleOf(agent)),
      h("div", { class: "acts" }, actions),
      turn ? turnFacts(turn) : facts(agent, known),
    );
    if (focus) this.detail.querySelector(`[data-key="${focus}"]`)?.focus();
  }
}

const markOf = (agent) => agent && `${agent.created} ${agent.head} ${agent.state} ${agent.turns}`;
