// The rows of the tree of contexts: agents, their turns and forks. No DOM.

import { titleOf } from "/web/titles.js";

const ORDERS = {
  created: (a, b) => b.created - a.created || (a.id < b.id ? -1 : 1),
  used: (a, b) => b.last_used - a.last_used,
  size: (a, b) => b.tokens - a.tokens,
  saved: (a, b) => savedTokens(b) - savedTokens(a),
  name: (a, b) => titleOf(a).localeCompare(titleOf(b)),
};

export const savedTokens = (agent) =>
  agent.savings.pool + agent.savings.ram + agent.savings.disk + agent.savings.shared;

/** Return whether an agent matches the search. */
export function fits(agent, wanted) {
  if (agent.id.toLowerCase().includes(wanted) || agent.origin.toLowerCase().includes(wanted)) return true;
  return Object.values(agent.metadata).some((value) => value.toLowerCase().includes(wanted));
}

/**
 * Return all rows in order. `open`: ids of agents whose turns and forks are shown; `turns`: turns loaded so far.
 * A row is {key, kind, depth, at, of, agent, turn, open}: the `at`th of `of` siblings.
 */
export function rows(agents, { open, turns, wanted = "", order = "created" }) {
  const found = [];
  const children = new Map();
  const roots = [];
  for (const agent of agents.values()) {
    if (wanted) {
      if (fits(agent, wanted)) roots.push(agent);
    } else if (agent.origin && agents.has(agent.origin) && agent.origin !== agent.id && !looped(agents, agent)) {
      if (!children.has(agent.origin)) children.set(agent.origin, []);
      children.get(agent.origin).push(agent);
    } else roots.push(agent);
  }
  const sorted = ORDERS[order] ?? ORDERS.created;
  const add = (agent, depth, at, of) => {
    const forks = children.get(agent.id) ?? [];
    const isOpen = open.has(agent.id);
    found.push({ key: agent.id, kind: "agent", depth, at, of, agent, forks: forks.length, open: isOpen });
    if (!isOpen) return;
    forks.sort(sorted);
    const mine = turns.get(agent.id);
    const list = mine ? branches(mine) : [];
    const total = list.length + forks.length + (mine ? 0 : 1);
    let place = 1;
    const forked = (number) => {
      for (const one of forks) if (one.origin_turn === number) add(one, depth + 1, place++, total);
    };
    if (!mine)
      found.push({
        key: `${agent.id} …`,
        kind: "note",
        depth: depth + 1,
        at: place++,
        of: total,
        agent,
        text: "Loading the turns …",
      });
    forked(0);
    const shown = new Set([0]);
    for (const { turn, depth: more } of list) {
      shown.add(turn.number);
      found.push({
        key: `${agent.id} ${turn.number}`,
        kind: "turn",
        depth: depth + 1 + more,
        at: place++,
        of: total,
        agent,
        turn,
      });
      forked(turn.number);
    }
    for (const one of forks) if (!shown.has(one.origin_turn)) add(one, depth + 1, place++, total);
  };
  roots.sort(sorted);
  roots.forEach((agent, at) => add(agent, 0, at + 1, roots.length));
  return found;
}

/** Return whether an agent would be its own descendant: its origin was deleted and its name reused. */
function looped(agents, agent) {
  const seen = new Set([agent.id]);
  for (let one = agents.get(agent.origin); one; one = agents.get(one.origin)) {
    if (seen.has(one.id)) return true;
    seen.add(one.id);
    if (!one.origin) return false;
  }
  return false;
}

/** Return turns in tree order: the current path unindented, abandoned branches indented where they leave it. */
export function branches(turns) {
  const below = new Map();
  const numbered = new Map(turns.map((one) => [one.number, one]));
  for (const turn of turns) {
    const parent = numbered.has(turn.parent) ? turn.parent : 0;
    if (!below.has(parent)) below.set(parent, []);
    below.get(parent).push(turn);
  }
  const found = [];
  const todo = [[0, 0]];
  while (todo.length) {
    const [number, depth] = todo.pop();
    const next = [...(below.get(number) ?? [])].sort((a, b) => a.current - b.current || a.number - b.number);
    const main = next.pop();
    if (main) todo.push([main.number, depth]);
    if (number) found.push({ turn: numbered.get(number), depth });
    for (const one of next.reverse()) todo.push([one.number, depth + 1]);
  }
  return found;
}
