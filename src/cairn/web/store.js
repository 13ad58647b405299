// The page's copy of the server's state. One stream of events keeps it current; views subscribe to changes.

import { ApiError, ask, events, keys } from "/web/api.js";

const listeners = new Map();

export const store = {
  /** Agents by id. */
  agents: new Map(),
  /** Counts changes of `agents`. */
  version: 0,
  requests: { total: 0, requests: [] },
  savings: null,
  server: null,
  hello: null,
  /** State of the connection: connecting, live, loading, lost or key. */
  link: "connecting",
  why: "",
  models: [],
};

/** Call `f` when the state of this name changes; return a function that unsubscribes. */
export function on(name, f) {
  if (!listeners.has(name)) listeners.set(name, new Set());
  listeners.get(name).add(f);
  return () => listeners.get(name).delete(f);
}

export function tell(name) {
  for (const f of listeners.get(name) ?? []) f();
}

/** Apply an agent's state from a response before the stream reports it. */
export function took(agent) {
  store.agents.set(agent.id, agent);
  store.version++;
  tell("agents");
}

export function dropped(id) {
  store.agents.delete(id);
  store.version++;
  tell("agents");
}

// ------------------------------------------------------------------------------------------------------- the stream

const HIDDEN_SECONDS = 20;
const SILENT_SECONDS = 45;
let seen = "";
let control = null;
let coming = null;
let wait = 0;
let hiddenTimer = 0;
let generation = 0;

function link(state, why = "") {
  if (store.link === state && store.why === why) return;
  store.link = state;
  store.why = why;
  tell("link");
}

const TAKES = {
  hello(data) {
    store.hello = data;
    if (!data.server) store.server = null;
    tell("hello");
  },
  snapshot(data) {
    if (data.begin) coming = new Map();
    for (const agent of data.agents) coming?.set(agent.id, agent);
    if (!data.end || !coming) return;
    store.agents = coming;
    coming = null;
    store.version++;
    tell("agents");
  },
  agents(data) {
    for (const id of data.gone) store.agents.delete(id);
    for (const agent of data.changed) store.agents.set(agent.id, agent);
    store.version++;
    tell("agents");
  },
  requests(data) {
    store.requests = data;
    tell("requests");
  },
  savings(data) {
    store.savings = data;
    tell("savings");
  },
  server(data) {
    store.server = data;
    tell("server");
  },
};

async function follow() {
  control = new AbortController();
  const headers = {};
  if (seen) headers["Last-Event-ID"] = seen;
  if (keys.admin) headers["X-Cairn-Admin-Key"] = keys.admin;
  const mine = control;
  let heard = Date.now();
  const watch = setInterval(() => Date.now() - heard > 1000 * SILENT_SECONDS && mine.abort(), 5000);
  try {
    const response = await ask("GET", "/v1/events", undefined, { headers, signal: mine.signal });
    link("live");
    wait = 0;
    for await (const event of events(response, () => {
      heard = Date.now();
    })) {
      TAKES[event.event]?.(JSON.parse(event.data));
      if (event.id) seen = event.id;
    }
  } finally {
    clearInterval(watch);
  }
}

/** Read the stream of changes until a newer generation takes over. */
async function run(mine) {
  while (mine === generation) {
    try {
      await follow();
      if (mine === generation) link("lost", "the server ended the connection");
    } catch (error) {
      if (mine !== generation) return;
      const status = error instanceof ApiError ? error.status : 0;
      if (status === 401 || status === 403) {
        link("key", error.message);
        return;
      }
      link(status === 503 ? "loading" : "lost", error.message);
    }
    wait = Math.min(8, wait ? 2 * wait : 0.5);
    await new Promise((done) => setTimeout(done, 1000 * wait));
  }
}

function stop() {
  generation++;
  control?.abort();
}

function start() {
  wait = 0;
  run(generation);
}

/** Restart the stream of changes, for example with other keys. */
export function connect() {
  stop();
  seen = "";
  coming = null;
  link("connecting");
  start();
}

// A hidden page costs nothing: its connection is closed, and missed events arrive with the next one.
let away = false;
document.addEventListener("visibilitychange", () => {
  clearTimeout(hiddenTimer);
  if (document.hidden) {
    hiddenTimer = setTimeout(() => {
      away = true;
      stop();
    }, 1000 * HIDDEN_SECONDS);
  } else if (away) {
    away = false;
    if (store.link !== "key") start();
  }
});
