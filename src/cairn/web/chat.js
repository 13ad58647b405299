// The chat view: an agent's turns, and the form for the next one. The server stores every message.

import { agentPath, ApiError, ask, get, post } from "/web/api.js";
import { Answer, action, asked, textOf } from "/web/answer.js";
import { closesList, complain, dialog, field, framed, h, put, say, button } from "/web/dom.js";
import { ChatList, chatMenu, titled } from "/web/chats.js";
import { AnswerStream } from "/web/answer_stream.js";
import { carriedOver, chatModels, contextOf, roomMeter, waysOn } from "/web/full_context.js";
import { connect, on, store, took } from "/web/store.js";
import { titleOf } from "/web/titles.js";
import { samplingFields, samplingOptions } from "/web/sampling.js";

const FETCHED = 60;
const FULL = "context_length_exceeded";

/** Return the view. `id`: the agent's; empty for a new chat. */
export function chatView(id) {
  return new Chat(id).start();
}

class Chat {
  constructor(id) {
    this.id = id;
    this.turns = [];
    this.first = 0; // turns before this number are not loaded
    this.busy = null; // the answer that is being read
    this.ends = [];
    this.build();
  }

  start() {
    this.ends.push(
      on(
        "agents",
        framed(() => {
          this.list();
          this.changed();
        }),
      ),
      on("models", () => this.models()),
      on("link", () => this.onlink()),
    );
    this.list();
    this.models();
    if (this.id) this.load();
    else this.fresh();
    if (drafts.get(this.id)) {
      this.input.value = drafts.get(this.id);
      requestAnimationFrame(() => this.grow());
    }
    drafts.delete(this.id);
    return { node: this.node, end: () => this.end(), focus: () => this.input.focus({ preventScroll: true }) };
  }

  end() {
    for (const stop of this.ends) stop();
    if (this.input.value.trim()) drafts.set(this.id, this.input.value);
    this.busy?.control.abort(); // the turn goes on: its events are kept for who comes back
    this.ended = true;
  }

  // ------------------------------------------------------------------------------------------------------ the parts

  build() {
    this.chats = new ChatList();
    this.chosen = ""; // the model that the person picked; otherwise the chat's own
    this.model = h("select", {
      "aria-label": "Model",
      onchange: () => {
        this.chosen = this.model.value;
        this.room();
      },
    });
    this.meter = roomMeter();
    this.menu = chatMenu(() => this.agent ?? this.told);
    this.menu.hidden = true;
    this.ways = h("div");
    this.name = h("h1", { class: "title" }, "New chat");
    this.settings = h("details", { class: "settings" }, h("summary", null, "Settings"), this.settingFields());
    this.log = h("div", { class: "log", role: "log", "aria-live": "off", "aria-label": "Conversation", tabindex: 0 });
    this.input = h("textarea", {
      rows: 1,
      placeholder: "Message",
      "aria-label": "Message",
      oninput: () => this.grow(),
      onkeydown: (e) => this.key(e),
    });
    this.send = button("Send", () => this.submit(), { class: "primary" });
    this.stop = button("Stop", () => this.halt(), { hidden: true });
    this.note = h("p", { class: "note", role: "status" });
    const toggle = button("Chats", () => this.node.classList.toggle("open"), { class: "quiet narrow" });
    this.node = h(
      "div",
      { class: "chat", onclick: closesList },
      this.chats.node,
      h(
        "section",
        { class: "talk", "aria-label": "Chat" },
        h("div", { class: "talkhead" }, toggle, this.name, h("span", { class: "grow" }), this.meter.node, this.model, this.menu, this.settings),
        this.log,
        this.ways,
        this.note,
        h(
          "form",
          {
            class: "composer",
            onsubmit: (e) => {
              e.preventDefault();
              this.submit();
            },
          },
          this.input,
          this.send,
          this.stop,
        ),
      ),
    );
  }

  settingFields() {
    this.system = h("textarea", { rows: 3 });
    this.tools = h("textarea", { rows: 3, spellcheck: "false" });
    this.beginning = h(
      "div",
      null,
      field("System prompt", this.system),
      field("Tools (a JSON list)", this.tools, "As OpenAI's API has them. Calls are shown; you answer them."),
    );
    return h("div", { class: "panel" }, this.beginning, samplingFields());
  }

  list() {
    this.chats.current = this.id;
    this.chats.draw();
  }

  models() {
    const wanted = this.chosen || this.told?.model || this.model.value;
    const models = chatModels();
    put(
      this.model,
      models.map((one) =>
        h("option", { value: one.id }, one.state && one.state !== "loaded" ? `${one.id} (${one.state})` : one.id),
      ),
    );
    const shown = models.find((one) => one.id === wanted) ?? models.find((one) => one.state === "loaded");
    if (shown) this.model.value = shown.id;
    this.model.hidden = !models.length;
    this.room();
  }

  onlink() {
    const waits = {
      loading: "The model is being loaded.",
      lost: "The server cannot be reached. What you wrote stays here.",
      key: "This server needs a key.",
    };
    this.note.textContent = waits[store.link] ?? "";
    if (store.link === "live" && !this.busy) this.models();
  }

  grow() {
    this.input.style.setProperty("height", "auto");
    this.input.style.setProperty("height", `${Math.min(240, this.input.scrollHeight + 2)}px`);
  }

  key(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.submit();
    }
  }

  // ------------------------------------------------------------------------------------------------ what there is

  fresh() {
    put(
      this.log,
      h(
        "div",
        { class: "empty" },
        h("h2", null, "What is on your mind?"),
        h(
          "p",
          null,
          "What you chat here is an agent: the server keeps its turns and its context, through restarts. Nothing of it is computed twice.",
        ),
      ),
    );
  }

  /** Update the meter of the context. */
  room() {
    this.menu.hidden = !this.id;
    this.meter.show((this.agent ?? this.told)?.tokens ?? 0, contextOf(this.model.value));
  }

  get agent() {
    return store.agents.get(this.id);
  }

  /** Read the agent and show it. One read at a time; a call meanwhile causes one more. */
  async load(before) {
    if (this.loading) {
      this.stale = true;
      return this.loading;
    }
    this.loading = this.fetch(before);
    await this.loading;
    this.loading = null;
    if (!this.stale || this.ended) return undefined;
    this.stale = false;
    return this.load();
  }

  async fetch(before) {
    try {
      const agent = before ? this.agent : await get(agentPath(this.id));
      if (!before) took(agent);
      const from = Math.max(0, (before ?? agent.head + 1) - 1 - FETCHED);
      const page = await get(agentPath(this.id, `turns?limit=100&after=${from}`));
      if (this.ended || this.busy) return; // an answer that is being shown stays
      const known = before ? this.turns : [];
      const numbers = new Set(known.map((one) => one.number));
      this.turns = [...page.data.filter((one) => !numbers.has(one.number)), ...known].sort(
        (a, b) => a.number - b.number,
      );
      this.first = from;
      this.head = agent.head;
      this.told = agent;
      this.models();
      this.draw();
      const last = this.path().at(-1);
      if (last?.state === "running") this.rejoin(last);
    } catch (error) {
      if (error instanceof ApiError && error.status === 404) {
        put(
          this.log,
          h("div", { class: "empty" }, h("h2", null, "There is no such chat"), h("p", null, error.message)),
        );
      } else if (error.status !== 401) complain(error);
    }
  }

  /** Handle a change of the agent reported by the server: another client may have continued it. */
  changed() {
    const agent = this.agent;
    if (!this.id || this.busy || !agent || this.loading || !this.told) return;
    this.name.textContent = titleOf(agent);
    this.room();
    if (agent.head === this.head && (agent.state === "running") === (this.path().at(-1)?.state === "running")) return;
    this.load();
  }

  path() {
    return this.turns.filter((one) => one.current);
  }

  draw() {
    const agent = this.agent ?? this.told;
    this.name.textContent = titleOf(agent);
    this.beginning.hidden = true;
    this.room();
    const before =
      this.first > 0 ? button("Show earlier turns", () => this.load(this.first + 1), { class: "quiet" }) : null;
    const opening = (this.told.messages ?? []).map(opened);
    const path = this.path();
    put(
      this.log,
      this.told.damage && h("p", { class: "warn" }, this.told.damage),
      this.first ? before : opening,
      path.map((turn) => this.turnNode(turn)),
    );
    const last = path.at(-1);
    const room = contextOf(this.model.value);
    if (last?.finish_reason === "length" && room && agent.tokens >= room - 1) this.full();
    else put(this.ways);
    this.bottom();
  }

  turnNode(turn) {
    const siblings = this.turns.filter((one) => one.parent === turn.parent);
    const actions = [action("Edit", () => this.edit(turn), { title: "Change it and ask again" })];
    if (siblings.length > 1) {
      const at = siblings.indexOf(turn);
      actions.unshift(
        action("‹", () => this.switch(siblings[at - 1]), { disabled: at === 0, "aria-label": "Previous version" }),
        h("span", { class: "versions" }, `version ${at + 1} of ${siblings.length}`),
        action("›", () => this.switch(siblings[at + 1]), {
          disabled: at === siblings.length - 1,
          "aria-label": "Next version",
        }),
      );
    }
    const users = turn.messages.filter((one) => one.role === "user");
    const answer = new Answer();
    answer.set(turn.answer);
    const { cairn, completion_tokens: tokens, finish_reason: reason, finish_detail: detail, timing } = turn;
    this.over(answer, turn, { cairn, tokens, reason, detail, timing });
    return h(
      "div",
      { class: "turn", "data-turn": turn.number },
      turn.messages.map((one) => asked(one, one === users.at(-1) ? actions : [])),
      answer.node,
    );
  }

  over(answer, turn, facts) {
    const state = turn.state;
    const last = turn.number === this.head;
    const tail = [];
    if (state === "finished") {
      tail.push(
        action("Again", () => this.again(turn), { title: "Answer it anew; this answer stays as another version" }),
        action("Branch", () => this.branch(turn), { title: "A new chat that shares everything up to here" }),
      );
    }
    if (state === "interrupted" && last) {
      answer.told(
        h("span", null, "This answer was interrupted."),
        action("Go on", () => this.resume(turn)),
        action("Again", () => this.again(turn)),
      );
    } else if (state === "damaged") answer.told("The disk lost this answer.");
    else answer.told();
    answer.finish({ ...facts, tail });
    if (state === "finished" && last && answer.calls.length) answer.actions.append(this.callAnswers(answer.calls));
  }

  /** Show fields for the results of the model's tool calls. */
  callAnswers(calls) {
    const fields = calls.map((call) => [call, h("textarea", { rows: 2 })]);
    return h(
      "form",
      {
        class: "results",
        onsubmit: (event) => {
          event.preventDefault();
          this.turn(fields.map(([call, input]) => ({ role: "tool", tool_call_id: call.id, content: input.value })));
        },
      },
      fields.map(([call, input]) => field(`Result of ${call.name}`, input)),
      h("button", { type: "submit" }, "Give the results"),
    );
  }

  bottom(force = true) {
    const log = this.log;
    if (force || log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
  }

  // ------------------------------------------------------------------------------------------------ what is done

  async submit() {
    const text = this.input.value;
    if (!text.trim() || this.busy) return;
    put(this.ways);
    this.input.value = "";
    this.grow();
    if (!(await this.turn([{ role: "user", content: text }]))) {
      if (this.ended) drafts.set(this.id, text);
      if (!this.input.value) this.input.value = text;
      this.grow();
    }
  }

  /** Return the agent; create it if this chat is new. */
  async open(messages) {
    if (this.id) return;
    const body = { metadata: { title: titled(textOf(messages[0])) } };
    if (this.system.value.trim()) body.system = this.system.value;
    if (this.tools.value.trim()) body.tools = JSON.parse(this.tools.value);
    if (this.model.value) body.model = this.model.value;
    const agent = await post("/v1/agents", body);
    took(agent);
    this.id = agent.id;
    this.told = { ...agent, messages: body.system ? [{ role: "system", content: body.system }] : [] };
    this.head = 0;
    this.name.textContent = titleOf(agent);
    put(
      this.log,
      this.told.messages.map(opened),
    );
    if (this.ended) return; // another view is shown now
    history.replaceState(null, "", `#/chat/${encodeURIComponent(agent.id)}`);
    this.list();
  }

  /**
   * Send a turn; return whether the server accepted it. `back`: the turn to go back to if it is refused, where the chat
   * was rolled back for it.
   */
  async turn(messages, back = null) {
    if (this.busy) return false;
    const answer = new Answer();
    this.begin(answer);
    try {
      await this.open(messages);
      const last = this.path().at(-1);
      if (last && (last.state === "interrupted" || last.state === "damaged")) {
        back ??= this.head;
        await this.rollTo(last.parent);
      }
      const node = h(
        "div",
        { class: "turn" },
        messages.map((one) => asked(one)),
        answer.node,
      );
      this.log.append(node);
      this.bottom();
      const body = {
        messages,
        stream: true,
        stream_options: { include_usage: true },
        timings_per_token: true,
        return_progress: true,
        ...(this.model.value ? { model: this.model.value } : {}),
        repetition_stop: true,
        ...samplingOptions(),
      };
      // A view that ended while the chat was made still sends its message; whoever comes back follows the turn.
      const signal = this.ended ? undefined : this.busy.control.signal;
      const response = await ask("POST", agentPath(this.id, "turns"), body, { signal });
      await this.busy.hear(response);
      return true;
    } catch (error) {
      const aborted = this.busy.control.signal.aborted;
      if (this.ended && aborted) return true; // the turn goes on without this view
      const shown = answer.node.isConnected && !aborted;
      this.failed(error, answer);
      const begun = this.busy?.begun ?? false;
      if (!begun && back !== null && !this.ended) await this.comeBack(back, error, shown);
      return begun;
    } finally {
      await this.done();
    }
  }

  begin(answer) {
    this.busy = new AnswerStream(answer);
    answer.ondrawn = () => this.bottom(false);
    this.send.hidden = true;
    this.stop.hidden = false;
    this.log.setAttribute("aria-busy", "true");
    say("The model is answering.");
  }

  failed(error, answer) {
    this.busy?.stopTimer();
    if (this.busy?.control.signal.aborted) return;
    if (!answer.node.isConnected) complain(error); // it came to no turn
    if (error.status === 499) answer.told("Stopped.");
    else {
      answer.told(h("span", { class: "warn" }, error.message));
      if (error.status === 401) connect();
      if (!this.busy?.begun) answer.node.parentNode?.classList.add("refused");
      if (error.code === FULL) this.full();
    }
    say(error.message);
    this.bottom();
  }

  async done() {
    this.busy.end();
    const { facts, begun } = this.busy;
    this.busy = null;
    this.send.hidden = false;
    this.stop.hidden = true;
    this.log.removeAttribute("aria-busy");
    if (this.ended) return;
    if (begun) await this.load();
    if (facts) say("The answer is complete.");
    this.input.focus();
  }

  async halt() {
    const busy = this.busy;
    if (!busy) return;
    this.stop.disabled = true;
    try {
      for (let tries = 0; !busy.request && tries < 50; tries++) await new Promise((go) => setTimeout(go, 100));
      if (busy.request) await post(`/v1/requests/${busy.request}/cancel`);
      else busy.control.abort();
    } catch (error) {
      complain(error);
    } finally {
      this.stop.disabled = false;
    }
  }

  /** Follow a turn that is running: after a reload, or one that another client began. */
  async rejoin(turn) {
    if (this.busy) return;
    const answer = new Answer();
    this.begin(answer);
    this.busy.request = turn.request;
    this.log.lastElementChild?.querySelector(".answer")?.replaceWith(answer.node);
    try {
      const response = await ask("GET", `/v1/requests/${turn.request}/events`, undefined, {
        signal: this.busy.control.signal,
      });
      await this.busy.hear(response);
    } catch (error) {
      if (error.status !== 404) this.failed(error, answer);
      else await new Promise((go) => setTimeout(go, 1000));
      if (this.busy) this.busy.begun = error.status !== 404;
    } finally {
      await this.done();
    }
  }

  async resume(turn) {
    if (this.busy) return;
    const answer = new Answer();
    this.begin(answer);
    this.log.lastElementChild?.querySelector(".answer")?.replaceWith(answer.node);
    try {
      const response = await ask(
        "POST",
        agentPath(this.id, "resume"),
        { stream: true },
        { signal: this.busy.control.signal },
      );
      await this.busy.hear(response);
    } catch (error) {
      this.failed(error, answer);
      if (!this.busy?.begun) complain(error);
      if (this.busy) this.busy.begun = true; // it is shown as it is
    } finally {
      await this.done();
    }
  }

  async rollTo(number) {
    const agent = await post(agentPath(this.id, "rollback"), { turn: number });
    took(agent);
    this.head = agent.head;
    for (const one of this.turns) one.current = false;
    for (let at = number; at;) {
      const one = this.turns.find((turn) => turn.number === at);
      if (!one) break;
      one.current = true;
      at = one.parent;
    }
    this.draw();
  }

  /** Undo a roll back whose turn was refused, and show the error again if it was `shown` with that turn. */
  async comeBack(head, error, shown) {
    try {
      await this.rollTo(head);
      if (error.code === FULL) this.full();
      if (shown) complain(error);
    } catch (failure) {
      complain(failure);
    }
  }

  edit(turn) {
    if (this.busy) return;
    const users = turn.messages.filter((one) => one.role === "user");
    const input = h("textarea", { rows: 6, "aria-label": "Message" });
    input.value = textOf(users.at(-1) ?? { content: "" });
    dialog("Edit and ask again", (close) => [
      input,
      h(
        "p",
        { class: "soft" },
        "The chat goes back to before this message. What followed stays as another version for a week.",
      ),
      h(
        "div",
        { class: "row end" },
        button("Cancel", close),
        button(
          "Send",
          () => {
            close();
            const messages = turn.messages.map((one) =>
              one === users.at(-1) ? { ...one, content: input.value } : one,
            );
            this.instead(turn, messages, input.value);
          },
          { class: "primary" },
        ),
      ),
    ]);
    input.focus();
  }

  again(turn) {
    this.instead(turn, turn.messages);
  }

  /** Ask again with these messages in the place of a turn. If they are refused, `text` goes to the form. */
  async instead(turn, messages, text = "") {
    if (this.busy) return;
    const head = this.head;
    try {
      await this.rollTo(turn.parent);
    } catch (error) {
      complain(error);
      return;
    }
    if ((await this.turn(messages, head)) || this.ended || this.input.value) return;
    this.input.value = text;
    this.grow();
  }

  /** Switch to another version: its latest turn becomes the head. */
  async switch(turn) {
    let leaf = turn;
    for (;;) {
      const next = this.turns.filter((one) => one.parent === leaf.number).at(-1);
      if (!next) break;
      leaf = next;
    }
    try {
      await this.rollTo(leaf.number);
    } catch (error) {
      complain(error);
    }
  }

  async branch(turn) {
    try {
      const agent = await post(agentPath(this.id, "fork"), { turn: turn.number });
      took(agent);
      location.hash = `#/chat/${encodeURIComponent(agent.id)}`;
      say("A branch was made.");
    } catch (error) {
      complain(error);
    }
  }

  // ---------------------------------------------------------------------------------------------- a full context

  /** Offer ways to continue when the context is full; keep the message that was not sent. */
  full(text) {
    put(
      this.ways,
      waysOn((way) => this.goOn(way, text)),
    );
    if (text && !this.input.value) this.input.value = text;
    this.grow();
  }

  async goOn(way, text) {
    if (way === "new") {
      drafts.set("", this.input.value || text || "");
      this.input.value = "";
      location.hash = "#/chat";
      return;
    }
    put(this.ways, h("div", { class: "ways" }, way === "drop" ? "Making a new chat …" : "Summarising …"));
    try {
      const turns = this.path().filter((one) => one.state === "finished");
      const messages = await carriedOver(this.told.messages ?? [], turns, way, this.model.value);
      const title = titleOf(this.agent ?? this.told);
      const body = { messages, metadata: { title: titled(`${title.replace(/ \(goes on\)$/, "").slice(0, 48)} (goes on)`) } };
      if (this.told.tools?.length) body.tools = this.told.tools;
      if (this.model.value) body.model = this.model.value;
      const agent = await post("/v1/agents", body);
      took(agent);
      drafts.set(agent.id, this.input.value || text || "");
      this.input.value = "";
      location.hash = `#/chat/${encodeURIComponent(agent.id)}`;
    } catch (error) {
      complain(error);
      this.full(text);
    }
  }
}

/** Return the view of a message that the chat began with. */
function opened(message) {
  if (message.role !== "assistant") return asked(message);
  const answer = new Answer();
  answer.set(message);
  return answer.node;
}

/** Unsent messages by the chat's id, of views that ended; under "" that of a new chat. */
const drafts = new Map();
