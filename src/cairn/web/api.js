// Requests to the server, with the API key, and streams of events.

export const keys = {
  get user() {
    return sessionStorage.getItem("cairn.key") ?? "";
  },
  set user(value) {
    keep("cairn.key", value);
  },
  get admin() {
    return sessionStorage.getItem("cairn.admin") ?? "";
  },
  set admin(value) {
    keep("cairn.admin", value);
  },
};

function keep(name, value) {
  if (value) sessionStorage.setItem(name, value);
  else sessionStorage.removeItem(name);
}

/** An error that the server answered with; the message is the server's. */
export class ApiError extends Error {
  constructor(status, body) {
    const told = body?.error;
    super((typeof told === "string" ? told : told?.message) ?? `the server answered ${status}`);
    this.status = status;
    this.code = told?.code;
  }
}

/** Send a request; return the response or throw ApiError. `admin`: use the admin key instead of the tenant's. */
export async function ask(method, path, body, { admin, headers, signal, raw } = {}) {
  const key = admin ? keys.admin || keys.user : keys.user;
  const sent = { ...headers };
  if (key) sent.Authorization = `Bearer ${key}`;
  if (body !== undefined && !raw) sent["Content-Type"] = "application/json";
  const given = body === undefined || raw ? body : JSON.stringify(body);
  const response = await fetch(path, { method, headers: sent, body: given, signal, cache: "no-store" });
  if (response.ok) return response;
  throw new ApiError(response.status, await response.json().catch(() => null));
}

export const get = async (path, more) => (await ask("GET", path, undefined, more)).json();
export const post = async (path, body = {}, more) => (await ask("POST", path, body, more)).json();
export const request = async (method, path, body, more) => (await ask(method, path, body, more)).json();
export const remove = async (path, more) => (await ask("DELETE", path, undefined, more)).json();

/** Return the path of an agent, or of a route below it. */
export const agentPath = (id, rest = "") => `/v1/agents/${encodeURIComponent(id)}${rest && "/" + rest}`;

/** Yield the events of a response, {id, event, data}, without comments; call `heard` for every piece that arrives. */
export async function* events(response, heard = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      heard();
      const from = Math.max(0, rest.length - 1);
      rest += value;
      if (rest.indexOf("\n\n", from) < 0) continue;
      const whole = rest.split("\n\n");
      rest = whole.pop();
      for (const text of whole) {
        const found = parseEvent(text);
        if (found) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export function parseEvent(text) {
  const found = { id: "", event: "message", data: null };
  const data = [];
  for (const line of text.split("\n")) {
    const at = line.indexOf(":");
    if (at <= 0) continue;
    const name = line.slice(0, at);
    const value = line.slice(line[at + 1] === " " ? at + 2 : at + 1);
    if (name === "data") data.push(value);
    else if (name === "id" || name === "event") found[name] = value;
  }
  found.data = data.join("\n");
  return data.length ? found : null;
}
