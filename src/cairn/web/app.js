// The page's start: routing between views, keys, light and dark colours, and the state of the connection.

import { keys } from "/web/api.js";
import { chatView } from "/web/chat.js";
import { contextsView } from "/web/contexts.js";
import { button, dialog, field, h, put } from "/web/dom.js";
import { fetchModels, nowView } from "/web/now.js";
import { savingsView } from "/web/savings.js";
import { connect, on, store } from "/web/store.js";
import { teamsView } from "/web/teams.js";

const VIEWS = { chat: chatView, contexts: contextsView, teams: teamsView, now: nowView, savings: savingsView };
const THEMES = ["", "light", "dark"];
const main = document.getElementById("main");
let shown = null;

function route() {
  const [, name, id] = /^#\/(\w+)\/?(.*)$/.exec(location.hash) ?? [];
  const known = VIEWS[name] ? name : "chat";
  shown?.end();
  let given = "";
  try {
    given = decodeURIComponent(id ?? "");
  } catch {
    /* no valid id */
  }
  shown = VIEWS[known](given);
  put(main, shown.node);
  shown.focus?.();
  document.title = `${known[0].toUpperCase()}${known.slice(1)} · Cairn`;
  for (const link of document.querySelectorAll("#nav a")) {
    if (link.getAttribute("href") === `#/${known}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

// --------------------------------------------------------------------------------------------------------- the keys

let asking = null;

function askForKeys(why = "") {
  if (asking) return;
  const user = h("input", { type: "password", autocomplete: "off", name: "key" });
  const admin = h("input", { type: "password", autocomplete: "off", name: "admin" });
  user.value = keys.user;
  admin.value = keys.admin;
  asking = dialog("Keys", (close) =>
    h(
      "form",
      {
        onsubmit: (event) => {
          event.preventDefault();
          keys.user = user.value.trim();
          keys.admin = admin.value.trim();
          close();
          begin();
        },
      },
      why && h("p", { class: "warn", role: "alert" }, why),
      field("API key", user, "Needed where the server was started with keys."),
      field("Admin key", admin, "Optional: for figures of the whole server, and for its models."),
      h("p", { class: "soft" }, "They stay in this tab until it is closed."),
      h(
        "div",
        { class: "row end" },
        button("Cancel", close),
        h("button", { type: "submit", class: "primary" }, "Use them"),
      ),
    ),
  );
  asking.addEventListener("close", () => {
    asking = null;
  });
  user.focus();
}

// --------------------------------------------------------------------------------------------------- the connection

const LINKS = {
  connecting: "connecting …",
  live: "live",
  loading: "loading the model …",
  lost: "no connection",
  key: "needs a key",
};

const NO_KEY = "This server needs a key. Whoever runs it can give you one.";
const WRONG_KEY =
  "This server does not know that key. Look for a missing character or a blank, or ask whoever runs the server.";

function showLink() {
  const node = document.getElementById("link");
  node.textContent = LINKS[store.link];
  node.className = `link ${store.link}`;
  node.title = store.why;
  if (store.link === "key") askForKeys(keys.user || keys.admin ? WRONG_KEY : NO_KEY);
  if (store.link === "live") fetchModels().catch(() => {});
}

function begin() {
  connect();
  route();
}

// ----------------------------------------------------------------------------------------------------- light and dark

function theme(change) {
  let at = Math.max(0, THEMES.indexOf(localStorage.getItem("cairn.theme") ?? ""));
  if (change) at = (at + 1) % THEMES.length;
  localStorage.setItem("cairn.theme", THEMES[at]);
  document.documentElement.dataset.theme = THEMES[at];
  document.getElementById("theme").title = THEMES[at] || "as the system";
}

// ------------------------------------------------------------------------------------------------- what opens over all

/** Close the settings and the menu of a chat, but those that hold `inside`. */
function closePanels(inside) {
  for (const open of document.querySelectorAll("details.settings[open]")) {
    if (!inside || !open.contains(inside)) open.open = false;
  }
}

document.addEventListener("pointerdown", (event) => closePanels(event.target));
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  const open = document.querySelector("details.settings[open]");
  closePanels();
  open?.querySelector("summary").focus();
});

on("link", showLink);
window.addEventListener("hashchange", route);
// As a link it would be a route.
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
document.getElementById("keys").addEventListener("click", () => askForKeys());
document.getElementById("theme").addEventListener("click", () => theme(true));
fetch("/docs", { method: "HEAD" })
  .then((found) => {
    document.getElementById("api").hidden = !found.ok;
  })
  .catch(() => {});
theme(false);
connect();
route();
