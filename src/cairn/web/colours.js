// Colours of the tree's nodes. Each colour comes with a word, so that nobody depends on seeing it.

import { ago, short } from "/web/format.js";
import { savedTokens } from "/web/tree.js";

const NAMES = { pool: "pool", ram: "memory", disk: "disk", shared: "shared", none: "nowhere", unknown: "?" };

/** Return the highest tier with at least half of a context's tokens from `start` to `end`. */
export function tier(kv, start, end) {
  if (!kv) return "unknown";
  if (end <= start) return "none";
  for (const name of ["pool", "ram", "disk", "shared"]) {
    if (Math.min(kv[name], end) - start >= (end - start) / 2) return name;
  }
  return "none";
}

/** Return the CSS class of the step that a number falls into. */
const heat = (value, steps) => `heat-${steps.filter((one) => value >= one).length}`;

export const MODES = {
  tier: "Where its KV lies",
  size: "Tokens",
  used: "Last use",
  saved: "Tokens saved",
  pinned: "Pinned",
};

/** Return {className, word} of a row. `kv`: tokens of the agent's context by tier, if known. */
export function colour(mode, row, kv, now) {
  const { agent, turn } = row;
  const tokens = turn ? turn.prompt_tokens + turn.completion_tokens : agent.tokens;
  switch (mode) {
    case "size":
      return { className: heat(tokens, [256, 1024, 4096, 16384]), word: short(tokens) };
    case "used": {
      const at = turn ? turn.began : agent.last_used;
      return { className: heat(-(now - at), [-604800, -86400, -3600, -300]), word: ago(at, now) };
    }
    case "saved": {
      const saved = turn ? turn.cached_tokens : savedTokens(agent);
      return { className: heat(saved, [256, 2048, 16384, 131072]), word: short(saved) };
    }
    case "pinned":
      return agent.pinned ? { className: "heat-4", word: "pinned" } : { className: "heat-0", word: "" };
    default: {
      if (turn && !turn.current) return { className: "tier-unknown", word: "left" };
      if (!agent.tokens) return { className: "tier-unknown", word: "empty" };
      const name = tier(kv, turn ? (turn.start ?? 0) : 0, tokens);
      return { className: `tier-${name}`, word: NAMES[name] };
    }
  }
}
