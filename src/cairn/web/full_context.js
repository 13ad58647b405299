// The meter of a chat's context, and the ways to continue once the context is full.

import { post } from "/web/api.js";
import { textOf } from "/web/answer.js";
import { button, h, put } from "/web/dom.js";
import { count, percent } from "/web/format.js";
import { store } from "/web/store.js";

const SUMMARY = 300; // tokens of a summary at most
const FEW = 0.9; // from here on the meter warns

/** Return the models that answer. */
export const chatModels = () => store.models.filter((one) => !one.kind || one.kind === "chat");

/** Return a model's context length in tokens; 0 if unknown. */
export function contextOf(model) {
  const one = store.models.find((other) => other.id === model) ?? chatModels()[0];
  return one?.max_model_len ?? 0;
}

/** Return the meter for a chat's header. */
export function roomMeter() {
  const node = h("span", { class: "roommeter", role: "img", hidden: true });
  return {
    node,
    show(tokens, room) {
      node.hidden = !tokens || !room;
      if (node.hidden) return;
      const part = Math.min(1, tokens / room);
      const text = `${count(tokens)} of ${count(room)} tokens of the context are used, ${percent(part)}`;
      node.title = text;
      node.setAttribute("aria-label", text);
      node.classList.toggle("few", part >= FEW);
      put(
        node,
        h("span", { class: "track" }, h("span", { class: "tier-pool", style: { width: `${100 * part}%` } })),
        h("small", null, percent(part)),
      );
    },
  };
}

/** Return the choices for a full context; `go` is called with the chosen one. */
export function waysOn(go) {
  return h(
    "div",
    { class: "ways", role: "alert" },
    h("strong", null, "This chat has filled the model's context."),
    h("span", null, "It stays as it is. A new chat can go on with part of it, or without it."),
    h(
      "div",
      { class: "row" },
      button("Leave out the oldest turns", () => go("drop")),
      button("Summarise the oldest turns", () => go("summarise")),
      button("New chat", () => go("new")),
    ),
  );
}

/** Return the messages of turns, for the beginning of a new chat. */
function messagesOf(turns) {
  return turns.flatMap((turn) => [...turn.messages, turn.answer ?? []].flat()).map((one) => ({
    role: one.role,
    content: one.content ?? "",
    ...(one.tool_calls ? { tool_calls: one.tool_calls } : {}),
    ...(one.tool_call_id ? { tool_call_id: one.tool_call_id } : {}),
  }));
}

/** Return the end of a text with at most `most` tokens, as the server counts them. */
async function newest(text, most, model) {
  for (let tries = 0; tries < 8 && text; tries++) {
    const tokens = await tokensOf({ content: text }, model);
    if (tokens <= most) return text;
    text = text.slice(-Math.floor((0.9 * text.length * most) / tokens));
  }
  return text;
}

/** Group messages, each group from one user's message to the next. */
function exchanges(messages) {
  const found = [];
  for (const one of messages) {
    if (one.role === "user" || !found.length) found.push([]);
    found.at(-1).push(one);
  }
  return found;
}

/** Return the beginning of a new chat: system messages, a summary if wanted, and the newest messages that fill half of the context. */
export async function carriedOver(first, turns, way, model) {
  const system = first.filter((one) => one.role === "system" || one.role === "developer");
  const all = exchanges([...first.filter((one) => !system.includes(one)), ...messagesOf(turns)]);
  const room = contextOf(model) || 4096;
  const old = all.splice(0, Math.ceil(all.length / 2));
  while (all.length && (await tokensOf({ messages: [...system, ...all.flat()] }, model)) > room / 2) old.push(all.shift());
  const kept = all.flat();
  if (way !== "summarise") return [...system, ...kept];
  const most = Math.min(SUMMARY, Math.floor(room / 6));
  const text = old.flat().map((one) => `${one.role}: ${textOf(one)}`);
  const said = await newest(text.join("\n"), Math.floor(room / 2), model);
  const answer = await post("/v1/chat/completions", {
    ...(model ? { model } : {}),
    messages: [{ role: "user", content: `Summarise this conversation in a few sentences:\n\n${said}` }],
    max_tokens: most,
  });
  const summary = textOf(answer.choices[0].message).trim();
  const told = [...system.map(textOf), `What was said before, in short: ${summary}`].join("\n\n");
  return [{ role: "system", content: told }, ...kept];
}

async function tokensOf(body, model) {
  return (await post("/tokenize", { ...(model ? { model } : {}), ...body })).count;
}
