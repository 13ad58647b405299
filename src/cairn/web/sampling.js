// The chat's sampling options. Empty fields use the server's defaults; values are stored in this browser.

import { get } from "/web/api.js";
import { field, h } from "/web/dom.js";

const OPTIONS = [
  ["temperature", "Temperature", 0, 10, 0.05],
  ["top_p", "Top p", 0, 1, 0.01],
  ["top_k", "Top k", 0, 100000, 1],
  ["min_p", "Min p", 0, 1, 0.01],
  ["repetition_penalty", "Repetition penalty", 0.01, 10, 0.01],
  ["max_tokens", "Most tokens", 1, 1000000, 1],
  ["reasoning_budget", "Most tokens of reasoning", -1, 1000000, 1],
  ["seed", "Seed", 0, 9007199254740991, 1],
];
const NAME = "cairn.sampling";
const NAMES = { repetition_penalty: "repeat_penalty" }; // as /props calls them

function kept() {
  try {
    return JSON.parse(localStorage.getItem(NAME) ?? "{}");
  } catch {
    return {};
  }
}

export function samplingFields() {
  const values = kept();
  const inputs = OPTIONS.map(([name, label, min, max, step]) => {
    const input = h("input", {
      type: "number",
      min,
      max,
      step,
      name,
      inputmode: "decimal",
      oninput: () => {
        const now = kept();
        if (input.value === "") delete now[name];
        else now[name] = Number(input.value);
        localStorage.setItem(NAME, JSON.stringify(now));
      },
    });
    if (values[name] !== undefined) input.value = values[name];
    return field(label, input);
  });
  const effort = h(
    "select",
    {
      onchange: () => {
        const now = kept();
        if (effort.value) now.reasoning_effort = effort.value;
        else delete now.reasoning_effort;
        localStorage.setItem(NAME, JSON.stringify(now));
      },
    },
    ["", "none", "low", "medium", "high"].map((one) => h("option", { value: one }, one || "default")),
  );
  effort.value = values.reasoning_effort ?? "";
  get("/props")
    .then((props) => {
      const params = props.default_generation_settings?.params ?? {};
      OPTIONS.forEach(([name], at) => {
        const given = params[NAMES[name] ?? name];
        if (given !== undefined && given !== -1) inputs[at].querySelector("input").placeholder = String(given);
      });
    })
    .catch(() => {});
  return h("fieldset", { class: "sampling" }, h("legend", null, "Sampling"), inputs, field("Reasoning", effort));
}

/** Return the options for the next turn. */
export const samplingOptions = kept;
