// Details of a selected context, and of one of its turns.

import { provenance, textOf } from "/web/answer.js";
import { h } from "/web/dom.js";
import { ago, count, seconds } from "/web/format.js";
import { savedTokens } from "/web/tree.js";

/** Return the details of an agent: its figures, and where its KV is if that is known. */
export function facts(agent, kv) {
  const lines = [
    ["Id", agent.id],
    ["State", agent.state + (agent.pinned ? ", pinned" : "")],
    ["Model", agent.model],
    ["Turns", count(agent.turns)],
    ["Context", `${count(agent.tokens)} tokens`],
    ["Made", ago(agent.created)],
    ["Last used", ago(agent.last_used)],
    agent.origin && ["Forked from", `${agent.origin}, turn ${agent.origin_turn}`],
    agent.ttl !== null && ["Kept", `${seconds(agent.ttl)} after its last use`],
    ["Computed", `${count(agent.savings.computed)} tokens in ${seconds(agent.savings.prefill_seconds)}`],
    ["Not computed again", `${count(savedTokens(agent))} tokens, ${seconds(agent.savings.seconds_avoided)}`],
    ...Object.entries(agent.metadata).filter(([name]) => name !== "title"),
  ].filter(Boolean);
  const tiers = kv
    ? ["pool", "ram", "disk", ...(kv.shared ? ["shared"] : [])].map((name) =>
        h(
          "div",
          { class: "meter" },
          h("span", null, { pool: "Pool", ram: "Memory", disk: "Disk", shared: "Shared" }[name]),
          h(
            "span",
            { class: "track", "aria-hidden": "true" },
            h("span", {
              class: `tier-${name}`,
              style: { width: `${agent.tokens ? Math.min(100, (100 * kv[name]) / agent.tokens) : 0}%` },
            }),
          ),
          h("span", null, `${count(kv[name])} of ${count(agent.tokens)}`),
        ),
      )
    : [];
  return [
    h("h3", null, "Where its KV lies"),
    tiers.length ? tiers : h("p", { class: "soft" }, agent.tokens ? "Not known now." : "It has no turns yet."),
    h(
      "dl",
      null,
      lines.map(([name, value]) => [h("dt", null, name), h("dd", null, value)]),
    ),
  ];
}

/** Return the details of a turn: the sources of its prompt, its messages and its answer. */
export function turnFacts(turn) {
  return [
    provenance(turn.cairn),
    turn.messages.map((one) => [h("h3", null, one.role), h("pre", { class: "plain" }, textOf(one).slice(0, 4000))]),
    turn.answer && [h("h3", null, "answer"), h("pre", { class: "plain" }, textOf(turn.answer).slice(0, 4000))],
    h(
      "dl",
      null,
      [
        ["Tokens", `${count(turn.prompt_tokens)} + ${count(turn.completion_tokens)}`],
        ["Began", ago(turn.began)],
        ["Ended", turn.finish_reason || turn.state],
      ].map(([name, value]) => [h("dt", null, name), h("dd", null, value)]),
    ),
  ];
}
