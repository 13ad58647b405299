// The view of one turn: its messages, its answer, and the sources of its prompt's tokens.

import { button, framed, h, put } from "/web/dom.js";
import { count, seconds } from "/web/format.js";
import { copier, Growing } from "/web/markdown.js";

const SOURCES = [
  ["computed", "computed now"],
  ["pool", "from the pool"],
  ["ram", "from memory"],
  ["disk", "from the disk"],
  ["shared", "from the shared store"],
];

const REASONS = {
  "different tokens": "it differs from what was known",
  "system text changed": "the system text differs from what was known",
  template: "the template wrote it differently",
  evicted: "that part had been evicted",
  "not stored yet": "that part was still on its way to the disk",
  "not stored": "that part was gone before it was stored",
  damaged: "what the disk had of that part was damaged",
  "no snapshot": "the model kept no state at that place",
  "model changed": "another model had read it",
  "never seen": "that part is new",
  "faster to compute": "to compute it was faster than to load it",
};

/** Return a line with the sources of a prompt's tokens, which opens to show the reasons of misses. */
export function provenance(cairn) {
  const total = SOURCES.reduce((sum, [name]) => sum + (cairn?.[name] ?? 0), 0);
  if (!total) return null;
  const parts = SOURCES.filter(([name]) => cairn[name]);
  const bar = h(
    "span",
    { class: "bar", "aria-hidden": "true" },
    parts.map(([name]) => h("span", { class: `tier-${name}`, style: { "flex-grow": cairn[name] } })),
  );
  const words = parts.map(([name, said]) =>
    h("span", { class: "source" }, h("i", { class: `dot tier-${name}` }), `${count(cairn[name])} ${said}`),
  );
  const miss = cairn.miss?.[0];
  const box = h(
    "details",
    { class: "provenance" },
    h("summary", null, bar, h("span", null, `${count(total)} prompt tokens:`), words),
  );
  if (cairn.load_seconds > 0.0005) box.append(h("p", null, `Loaded in ${seconds(cairn.load_seconds)}.`));
  if (miss) {
    box.append(
      h("p", { class: "miss" }, `Computed from token ${count(miss.position)} on: ${REASONS[miss.reason] ?? miss.reason}.`),
    );
    if (miss.differs) {
      box.append(
        h("p", null, `At token ${count(miss.differs.position)}. Before:`),
        h("pre", { class: "plain" }, miss.differs.known),
        h("p", null, "Now:"),
        h("pre", { class: "plain" }, miss.differs.given),
      );
    }
  }
  if (box.childElementCount === 1) box.append(h("p", null, "Where each token of the prompt came from."));
  return box;
}

/** Return the view of a message that the client sent. */
export function asked(message, actions = []) {
  const text = textOf(message);
  if (message.role === "user") {
    return h(
      "article",
      { class: "asked", "aria-label": "You" },
      h("div", { class: "text" }, text),
      h("div", { class: "actions" }, actions),
    );
  }
  const names = { tool: "Result of a call", system: "System prompt", developer: "System prompt" };
  return h(
    "details",
    { class: "aside" },
    h("summary", null, names[message.role] ?? message.role),
    h("pre", { class: "plain" }, text),
  );
}

export function textOf(message) {
  const content = message.content;
  if (Array.isArray(content)) return content.map((part) => part.text ?? "").join("");
  return content ?? "";
}

/** Return the view of a tool call. */
function called(call) {
  let shown = call.arguments;
  try {
    shown = JSON.stringify(JSON.parse(call.arguments), null, 2);
  } catch {
    /* shown unchanged: it may be incomplete */
  }
  return h(
    "figure",
    { class: "call" },
    h("figcaption", null, h("span", null, "calls ", h("code", null, call.name))),
    h("pre", { tabindex: 0 }, shown),
  );
}

/** The view of an answer, while it is generated and afterwards. */
export class Answer {
  constructor() {
    this.text = "";
    this.reasoning = "";
    this.calls = [];
    this.thought = h("div", { class: "text" });
    this.fold = h("details", { class: "reasoning", hidden: true }, h("summary", null, "Reasoning"), this.thought);
    this.body = h("div", { class: "text" });
    this.callBox = h("div");
    this.status = h("div", { class: "status" });
    this.foot = h("div", { class: "foot" });
    this.actions = h("div", { class: "actions" });
    this.node = h(
      "article",
      { class: "answer", "aria-label": "Answer" },
      this.fold,
      this.body,
      this.callBox,
      this.status,
      this.foot,
      this.actions,
    );
    this._body = new Growing(this.body);
    this._thought = new Growing(this.thought);
    this.draw = framed(() => this.drawn());
  }

  drawn() {
    this.fold.hidden = !this.reasoning;
    if (this.reasoning) this._thought.show(this.reasoning);
    this._body.show(this.text);
    if (this.calls.length) put(this.callBox, this.calls.map(called));
    this.ondrawn?.();
  }

  /** Add a piece of the stream. */
  add(delta) {
    this.text += delta.content ?? "";
    this.reasoning += delta.reasoning_content ?? "";
    for (const piece of delta.tool_calls ?? []) {
      const call = (this.calls[piece.index] ??= { id: "", name: "", arguments: "" });
      if (piece.id) call.id = piece.id;
      call.name += piece.function?.name ?? "";
      call.arguments += piece.function?.arguments ?? "";
    }
    this.draw();
  }

  /** Show the complete message that the server stores. */
  set(message) {
    this.text = textOf(message ?? {});
    this.reasoning = message?.reasoning_content ?? "";
    this.calls = (message?.tool_calls ?? []).map((call) => ({ id: call.id, ...call.function }));
    this.drawn();
  }

  clear() {
    this.text = this.reasoning = "";
    this.calls = [];
  }

  /** Show the prompt's progress. `part` is 0 to 1, or undefined if unknown. */
  progress(text, part) {
    const bar =
      part === undefined
        ? h("progress", { "aria-label": text })
        : h("progress", { max: 1, value: part, "aria-label": text });
    put(this.status, bar, h("span", null, text));
  }

  told(...children) {
    put(this.status, ...children);
  }

  /** Show what is known at the end: usage, times and the finish reason. */
  finish({ cairn, timing, tokens, reason, detail, tail = [] }) {
    const facts = [];
    if (tokens) facts.push(`${count(tokens)} tokens`);
    if (tokens && timing?.decode) facts.push(`${(tokens / timing.decode).toFixed(1)} tokens/s`);
    if (timing?.prefill) facts.push(`first token after ${seconds(timing.queue + timing.prefill)}`);
    if (detail === "repetition") facts.push("ended, since it repeated itself");
    else if (reason === "length") facts.push("cut at the token limit");
    put(
      this.foot,
      h(
        "div",
        { class: "facts" },
        facts.map((one) => h("span", null, one)),
      ),
      provenance(cairn),
    );
    put(this.actions, this.text ? copier(() => this.text) : null, tail);
  }
}

export const action = (text, f, props) => button(text, f, { class: "quiet small", ...props });
