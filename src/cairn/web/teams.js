// The view of teams and workflows: running rounds, votes, and a run's graph with the state of each node.

import { ask, events, get, post, remove } from "/web/api.js";
import { button, closesList, complain, dialog, field, framed, h, put, say, sure } from "/web/dom.js";
import { ago, count, percent, several } from "/web/format.js";
import { Growing, nodes } from "/web/markdown.js";
import { table } from "/web/now.js";
import { on, store } from "/web/store.js";

const TOPOLOGIES = ["round_robin", "broadcast", "coordinator", "free", "debate", "parliamentary"];
const PAUSE = 1500; // milliseconds between two looks at what somebody else lets run

const teamPath = (id, rest = "") => `/v1/teams/${encodeURIComponent(id)}${rest}`;
const runPath = (id, rest = "") => `/v1/workflows/runs/${encodeURIComponent(id)}${rest}`;

/** Return the view. `given`: "team/ID", "run/ID" or empty. */
export function teamsView(given) {
  const view = new Teams(given);
  return { node: view.node, end: () => view.end() };
}

class Teams {
  constructor(given) {
    [this.kind, this.id] = /^(team|run)\/(.+)$/.exec(given)?.slice(1) ?? ["", ""];
    this.names = h("div");
    this.body = h("section", { class: "page", "aria-label": "Selected" });
    // What is typed here outlives what is drawn anew around it.
    this.text = h("textarea", { rows: 2 });
    this.to = h("select");
    this.rounds = h("input", { type: "number", min: 1, max: 100, value: 1 });
    const toggle = button("Teams and runs", () => this.node.classList.toggle("open"), { class: "narrow" });
    this.node = h(
      "div",
      { class: this.id ? "chat" : "chat open", onclick: closesList },
      h(
        "aside",
        { class: "side", "aria-label": "Teams and runs" },
        button("New team", () => this.make(), { class: "wide" }),
        this.names,
      ),
      h("div", { class: "talk" }, h("div", { class: "talkhead narrow" }, toggle, !this.id && h("h1", { class: "title" }, "Teams and runs")), this.body),
    );
    if (!this.id)
      put(
        this.body,
        h("h1", null, "Teams and workflows"),
        h(
          "p",
          { class: "soft" },
          "Agents that work together, and graphs of nodes with contracts. Select one, or make a team.",
        ),
      );
    // Work that other clients start shows as requests that begin and end: then read it again.
    this.ends = [on("requests", () => this.soon()), on("link", () => store.link === "live" && this.look())];
    this.draw = framed(() => this.shown?.());
    this.look();
  }

  end() {
    this.ended = true;
    for (const stop of this.ends) stop();
    clearTimeout(this.timer);
    if (this.picture) URL.revokeObjectURL(this.picture);
  }

  soon() {
    if (this.timer) return;
    this.timer = setTimeout(() => {
      this.timer = 0;
      this.look();
    }, PAUSE);
  }

  async look() {
    try {
      const [teams, runs] = await Promise.all([get("/v1/teams?limit=100"), get("/v1/workflows/runs?limit=100")]);
      if (this.ended) return;
      const list = (kind, items, name, none = "None yet.") =>
        items.length
          ? h(
              "ul",
              { class: "names" },
              items.map((one) =>
                h(
                  "li",
                  null,
                  h(
                    "a",
                    {
                      href: `#/teams/${kind}/${encodeURIComponent(one.id)}`,
                      "aria-current": kind === this.kind && one.id === this.id ? "page" : null,
                    },
                    h("span", { class: "name" }, name(one)),
                    h("small", null, one.state === "idle" ? ago(one.created) : one.state),
                  ),
                ),
              ),
            )
          : h("p", { class: "soft" }, none);
      put(
        this.names,
        h("h2", null, "Teams"),
        list("team", teams.data, (one) => one.id),
        h("h2", null, "Runs"),
        list("run", runs.data, (one) => one.name || one.id, [
          "None yet. One is started in a terminal: ",
          h("code", null, "cairn workflow run FILE"),
        ]),
      );
      if (this.id && !this.busy) await (this.kind === "team" ? this.showTeam() : this.showRun());
    } catch (error) {
      if (error.status === 404) put(this.body, h("p", { class: "soft" }, error.message));
      else if (error.status !== 401 && error.status !== 503) complain(error);
    }
  }

  act(f) {
    return async () => {
      try {
        await f();
        await this.look();
      } catch (error) {
        complain(error);
      }
    };
  }

  // ---------------------------------------------------------------------------------------------------------- a team

  async showTeam() {
    const [team, told] = await Promise.all([get(teamPath(this.id)), get(teamPath(this.id, "/transcript"))]);
    const shape = JSON.stringify([team, told.entries.length]);
    if (this.ended || this.busy || shape === this.shape) return;
    this.shape = shape;
    const report = team.report;
    const prompts = report.prompt_tokens ?? 0;
    this.said = h(
      "div",
      { class: "said", role: "log", "aria-label": "Transcript", tabindex: 0 },
      told.entries.map(entryNode),
    );
    this.stop = button(
      "Interrupt",
      this.act(() => post(teamPath(this.id, "/interrupt"))),
      { hidden: team.state !== "running" },
    );
    const [focused, to] = [document.activeElement, this.to.value];
    put(
      this.to,
      ["everybody", ...team.members.map((one) => one.name)].map((one) =>
        h("option", { value: one === "everybody" ? "" : one }, one),
      ),
    );
    this.to.value = to;
    put(
      this.body,
      h("h1", null, team.id),
      h(
        "p",
        { class: "soft" },
        `${team.topology.kind.replaceAll("_", " ")}, ${several(team.rounds, "round")}, ${team.state}` +
          (team.decision ? `, decided: ${team.decision}` : "") +
          (prompts
            ? `. Of ${count(prompts)} prompt tokens ${percent((report.cached_tokens ?? 0) / prompts)} were not computed again; ` +
              `${count(report.shared_tokens)} are shared by all.`
            : "."),
      ),
      table(
        ["Member", "Role", "Context"],
        team.members.map((one) => [
          one.name,
          one.role,
          h("a", { href: `#/contexts/${encodeURIComponent(`${team.id}.${one.name}`)}` }, "show"),
        ]),
      ),
      h(
        "div",
        { class: "row acts" },
        button("Vote", () => this.vote(team)),
        this.stop,
        button("Delete", () => this.drop(team.id, teamPath(team.id)), { class: "danger" }),
      ),
      this.said,
      h(
        "form",
        {
          class: "post",
          onsubmit: (event) => {
            event.preventDefault();
            this.post();
          },
        },
        field("Say to the team", this.text),
        field("To", this.to),
        h("button", { type: "submit" }, "Say it"),
      ),
      h(
        "form",
        {
          class: "row post",
          onsubmit: (event) => {
            event.preventDefault();
            this.run(teamPath(team.id, "/rounds"), { rounds: Number(this.rounds.value) });
          },
        },
        field("Rounds", this.rounds),
        h("button", { type: "submit", class: "primary" }, "Let them speak"),
      ),
    );
    if ([this.text, this.to, this.rounds].includes(focused)) focused.focus({ preventScroll: true });
  }

  async post() {
    const [content, to] = [this.text.value, this.to.value];
    if (!content.trim()) return;
    await this.act(async () => {
      await post(teamPath(this.id, "/messages"), { content, ...(to ? { to: [to] } : {}) });
      if (this.text.value === content) this.text.value = "";
      if (this.busy) say("It was said; the team reads it when it speaks next.");
    })();
  }

  vote(team) {
    const question = h("input", { type: "text", required: true });
    const options = h("textarea", { rows: 3, required: true });
    options.value = "yes\nno";
    dialog("Vote", (close) =>
      h(
        "form",
        {
          onsubmit: (event) => {
            event.preventDefault();
            close();
            this.run(teamPath(team.id, "/votes"), {
              question: question.value,
              options: options.value
                .split("\n")
                .map((one) => one.trim())
                .filter(Boolean),
            });
          },
        },
        field("Question", question),
        field("Options, one a line", options),
        h(
          "div",
          { class: "row end" },
          button("Cancel", close),
          h("button", { type: "submit", class: "primary" }, "Let them vote"),
        ),
      ),
    );
    question.focus();
  }

  /** Start work on the server and show its events. */
  async run(path, body) {
    if (this.busy) return;
    this.busy = true;
    this.stop.hidden = false;
    this.said.setAttribute("aria-busy", "true");
    const speaking = new Map();
    try {
      const response = await ask("POST", path, { ...body, stream: true });
      // Also read after the view has ended: the server interrupts a round that nobody hears.
      for await (const { data } of events(response)) {
        if (data === "[DONE]") break;
        if (this.ended) continue;
        const event = JSON.parse(data);
        if (event.error) throw new Error(event.error.message);
        this.heard(event, speaking);
      }
      if (!this.ended) say("The team is done.");
    } catch (error) {
      if (!this.ended) complain(error);
    } finally {
      this.busy = false;
      this.shape = "";
      if (!this.ended) await this.look();
    }
  }

  heard(event, speaking) {
    const who = `${event.step} ${event.member}`;
    if (event.type === "turn.started") {
      const text = h("div", { class: "text" });
      speaking.set(who, { text: "", shown: new Growing(text) });
      this.said.append(h("article", { class: "answer" }, h("h3", null, event.member), text));
    } else if (event.type === "turn.delta" && event.content) {
      const one = speaking.get(who);
      if (!one) return;
      one.text += event.content;
      this.shown = () => speaking.forEach(({ text, shown }) => shown.show(text));
      this.draw();
    } else if (event.type === "vote.ballot") {
      this.said.append(h("p", { class: "soft" }, `${event.member} votes: ${[event.ranking].flat().join(" > ")}`));
    } else if (event.type === "vote.decided") this.said.append(entryNode({ ...event, type: "vote" }));
    else if (event.type === "round.started" || event.type === "choice") this.said.append(entryNode(event));
    this.said.scrollTop = this.said.scrollHeight;
  }

  make() {
    const id = h("input", { type: "text", placeholder: "drawn by the server" });
    const system = h("textarea", { rows: 3 });
    const members = h("textarea", { rows: 4, required: true });
    members.value = "ada: You ask.\nbob: You answer.";
    const kind = h(
      "select",
      null,
      TOPOLOGIES.map((one) => h("option", { value: one }, one.replaceAll("_", " "))),
    );
    dialog("New team", (close) =>
      h(
        "form",
        {
          onsubmit: async (event) => {
            event.preventDefault();
            try {
              const list = members.value
                .split("\n")
                .filter((line) => line.trim())
                .map((line) => {
                  const [name, ...role] = line.split(":");
                  return { name: name.trim(), role: role.join(":").trim() };
                });
              const topology = { kind: kind.value };
              if (kind.value === "coordinator") topology.coordinator = list[0]?.name;
              if (kind.value === "debate")
                Object.assign(topology, { sides: list.slice(0, 2).map((one) => one.name), judge: list[2]?.name });
              const team = await post("/v1/teams", {
                ...(id.value ? { id: id.value } : {}),
                system: system.value,
                members: list,
                topology,
              });
              close();
              location.hash = `#/teams/team/${encodeURIComponent(team.id)}`;
            } catch (error) {
              complain(error);
            }
          },
        },
        field("Name", id),
        field("Instructions for all members", system),
        field("Members, one a line: name: role", members),
        field(
          "Who speaks when",
          kind,
          "A coordinator is the first member; a debate has two sides and a judge, in this order.",
        ),
        h(
          "div",
          { class: "row end" },
          button("Cancel", close),
          h("button", { type: "submit", class: "primary" }, "Make it"),
        ),
      ),
    );
    id.focus();
  }

  async drop(name, path) {
    if (!(await sure("Delete", `${name} goes from the disk, with all its text.`, "Delete it"))) return;
    const id = this.id;
    this.id = ""; // nobody looks at what is going
    await remove(path).then(
      () => {
        location.hash = "#/teams";
      },
      (error) => {
        this.id = id;
        complain(error);
      },
    );
  }

  // ----------------------------------------------------------------------------------------------------------- a run

  async showRun() {
    const run = await get(runPath(this.id));
    const shape = JSON.stringify(run);
    if (this.ended || shape === this.shape) return;
    this.shape = shape;
    const drawing = await (await ask("GET", runPath(this.id, "/graph?format=svg"))).blob();
    if (this.ended) return;
    if (this.picture) URL.revokeObjectURL(this.picture);
    this.picture = URL.createObjectURL(drawing);
    const shown = (value) =>
      h("pre", { class: "plain" }, typeof value === "string" ? value : JSON.stringify(value, null, 2));
    const ended = Object.entries(run.nodes);
    put(
      this.body,
      h("h1", null, run.name || run.id),
      h("p", { class: "soft" }, `Run ${run.id}, ${run.state}, begun ${ago(run.created)}`),
      run.why && h("p", { class: "warn" }, run.why),
      h(
        "div",
        { class: "row acts" },
        ["interrupted", "failed"].includes(run.state) ? button("Resume", () => this.resume()) : "",
        run.state === "running"
          ? button(
              "Interrupt",
              this.act(() => post(runPath(this.id, "/interrupt"))),
            )
          : "",
        button("Delete", () => this.drop(run.name || run.id, runPath(this.id)), { class: "danger" }),
      ),
      h(
        "figure",
        { class: "graph", tabindex: 0, role: "group", "aria-label": "Graph" },
        h("img", {
          src: this.picture,
          alt: "The nodes of the run, coloured by their state; the table has them in words.",
        }),
      ),
      h("h2", null, "Nodes"),
      ended.length
        ? table(
            ["Node", "State", "Attempts", "Prompt", "Said"],
            ended.map(([key, one]) => [
              h("code", null, key),
              one.state + (one.why ? `: ${one.why}` : ""),
              count(one.attempts),
              `${count(one.prompt_tokens)} tokens, ${count(one.cached_tokens)} cached`,
              count(one.completion_tokens),
            ]),
          )
        : h("p", { class: "soft" }, "No node is done yet."),
      run.result !== null && [h("h2", null, "Result"), shown(run.result)],
      run.conflicts.length > 0 && [h("h2", null, "Conflicts"), shown(run.conflicts)],
      ended
        .filter(([, one]) => one.output !== null)
        .map(([key, one]) => h("details", null, h("summary", null, `Output of ${key}`), shown(one.output))),
    );
  }

  async resume() {
    this.act(() => post(runPath(this.id, "/resume")))();
    this.soon();
  }
}

/** Return the transcript's view of one event. */
function entryNode(entry) {
  switch (entry.type) {
    case "round.started":
      return h("h2", null, `Round ${entry.round}`);
    case "message":
      return h(
        "article",
        { class: "asked" },
        h("h3", null, entry.sender + (entry.to?.length ? ` whispers to ${entry.to.join(" and ")}` : "")),
        h("div", { class: "text" }, entry.content),
      );
    case "turn":
      return h(
        "article",
        { class: "answer" },
        h("h3", null, entry.member),
        h("div", { class: "text" }, nodes(entry.content)),
        h(
          "p",
          { class: "facts" },
          h("span", null, `${count(entry.prompt_tokens)} prompt tokens, ${count(entry.cached_tokens)} cached`),
          h("span", null, `${count(entry.completion_tokens)} said`),
        ),
      );
    case "choice":
      return h("p", { class: "soft" }, `${entry.member} (${entry.about}): ${entry.choice}`);
    case "vote":
      return h(
        "article",
        { class: "vote" },
        h("h3", null, `Vote: ${entry.question}`),
        h(
          "ul",
          null,
          Object.entries(entry.ballots).map(([name, ranking]) => h("li", null, `${name}: ${ranking.join(" > ")}`)),
        ),
        h("p", null, h("strong", null, entry.decision ?? "Nothing is decided"), ` (${entry.why})`),
      );
    default:
      return null;
  }
}
