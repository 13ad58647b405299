// The list of the user's chats: search by title at once and by full text a moment later; rename, export, delete.
// Agents of teams, programs and clients' sessions are under Contexts instead.

import { agentPath, ask, get, remove, request } from "/web/api.js";
import { textOf } from "/web/answer.js";
import { button, complain, dialog, field, h, put, say, sure } from "/web/dom.js";
import { ago, count } from "/web/format.js";
import { dropped, store, took } from "/web/store.js";
import { titleOf } from "/web/titles.js";

const LISTED = 60;
const READ = 200; // chats whose text is searched, the newest first
const AT_ONCE = 4;
const TITLE = 60;

const texts = new Map(); // agent -> {head, text}: what was read of it

/** Return whether an agent is a chat of this page: those have a title. */
export const isChat = (agent) => Boolean(agent.metadata?.title);

/** Shorten a text to a title. */
export const titled = (text) => text.trim().replace(/\s+/g, " ").slice(0, TITLE);

export class ChatList {
  constructor() {
    this.current = "";
    this.search = h("input", {
      type: "search",
      placeholder: "Search chats",
      "aria-label": "Search chats",
      oninput: () => {
        this.draw();
        this.read();
      },
    });
    this.names = h("ul", { class: "names" });
    this.node = h(
      "aside",
      { class: "side", "aria-label": "Chats" },
      h("a", { class: "button wide", href: "#/chat" }, "New chat"),
      this.search,
      this.names,
    );
  }

  get wanted() {
    return this.search.value.trim().toLowerCase();
  }

  chats() {
    return [...store.agents.values()].filter(isChat).sort((a, b) => b.last_used - a.last_used);
  }

  draw() {
    const { wanted } = this;
    const all = this.chats();
    const found = wanted
      ? all.filter((one) => titleOf(one).toLowerCase().includes(wanted) || texts.get(one.id)?.text.includes(wanted))
      : all;
    put(
      this.names,
      found.slice(0, LISTED).map((agent) => this.item(agent)),
      found.length > LISTED && h("li", null, h("a", { href: "#/contexts" }, `All ${count(found.length)} chats`)),
      wanted && !found.length && h("li", { class: "soft" }, this.reading ? "Looking …" : "No chat has this."),
    );
  }

  item(agent) {
    return h(
      "li",
      null,
      h(
        "a",
        {
          href: `#/chat/${encodeURIComponent(agent.id)}`,
          "aria-current": agent.id === this.current ? "page" : null,
        },
        h("span", { class: "name" }, titleOf(agent)),
        h("small", null, agent.state === "idle" ? ago(agent.last_used) : agent.state),
      ),
    );
  }

  /** Read the texts of chats that changed since they were last read, while a search is open. */
  async read() {
    if (this.reading || !this.wanted) return;
    this.reading = true;
    const todo = this.chats()
      .slice(0, READ)
      .filter((one) => texts.get(one.id)?.head !== one.head);
    const work = async () => {
      for (let agent = todo.shift(); agent && this.wanted; agent = todo.shift()) {
        try {
          const from = Math.max(0, agent.head - 100);
          const [whole, page] = await Promise.all([
            get(agentPath(agent.id)),
            get(agentPath(agent.id, `turns?limit=100&after=${from}`)),
          ]);
          const turns = page.data.flatMap((turn) => [...turn.messages, turn.answer ?? {}]);
          const said = [...(whole.messages ?? []), ...turns].map(textOf); // a chat may begin with what another had
          texts.set(agent.id, { head: agent.head, text: said.join("\n").toLowerCase() });
          this.draw();
        } catch {
          /* deleted meanwhile, or read with the next search */
        }
      }
    };
    await Promise.all(Array.from({ length: AT_ONCE }, work));
    this.reading = false;
    this.draw();
  }
}

/** Return the menu of a chat. */
export function chatMenu(current) {
  const menu = h(
    "details",
    { class: "settings menu" },
    h("summary", null, "Chat"),
    h(
      "div",
      { class: "panel small" },
      action("Rename", () => rename(current())),
      action("Export", () => download(current())),
      h("a", { class: "button", onclick: (event) => follow(event, current()), href: "#/contexts" }, "Show its context"),
      action("Delete", () => drop(current()), { class: "danger" }),
    ),
  );
  return menu;

  function action(text, f, props) {
    return button(
      text,
      () => {
        menu.open = false;
        f();
      },
      props,
    );
  }
}

function follow(event, agent) {
  event.preventDefault();
  location.hash = `#/contexts/${encodeURIComponent(agent.id)}`;
}

function rename(agent) {
  const name = h("input", { type: "text", maxlength: 200, required: true, value: titleOf(agent) });
  dialog("Rename the chat", (close) =>
    h(
      "form",
      {
        onsubmit: async (event) => {
          event.preventDefault();
          try {
            const metadata = { ...agent.metadata, title: name.value.trim() || titleOf(agent) };
            took(await request("PATCH", agentPath(agent.id), { metadata }));
            close();
            say("The chat has another name.");
          } catch (error) {
            complain(error);
          }
        },
      },
      field("Name", name),
      h(
        "div",
        { class: "row end" },
        button("Cancel", close),
        h("button", { type: "submit", class: "primary" }, "Rename"),
      ),
    ),
  );
  name.select();
}

async function download(agent) {
  try {
    const file = await (await ask("GET", agentPath(agent.id, "export"))).blob();
    const url = URL.createObjectURL(file);
    h("a", { href: url, download: `${agent.id}.cairn` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  } catch (error) {
    complain(error);
  }
}

async function drop(agent) {
  if (!(await sure("Delete the chat", `"${titleOf(agent)}" goes from the disk, with all its text.`, "Delete it"))) return;
  try {
    await remove(agentPath(agent.id));
    dropped(agent.id);
    location.hash = "#/chat";
    say("The chat was deleted.");
  } catch (error) {
    complain(error);
  }
}
