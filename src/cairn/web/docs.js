// The API's documentation for people, built from /openapi.json.

import { ask, keys } from "/web/api.js";
import { field, h, put } from "/web/dom.js";

const main = document.getElementById("main");

async function show() {
  const document = await (await ask("GET", "/openapi.json")).json();
  const groups = new Map(document.tags.map((tag) => [tag.name, []]));
  for (const [path, methods] of Object.entries(document.paths)) {
    for (const [method, operation] of Object.entries(methods))
      groups.get(operation.tags[0]).push([path, method, operation]);
  }
  put(
    main,
    h("h1", null, "Cairn's API"),
    h(
      "p",
      null,
      `Version ${document.info.version}. The description for programs is `,
      h("a", { href: "/openapi.json" }, "/openapi.json"),
      ".",
    ),
    [...groups].map(([name, operations]) => [
      h("h2", null, name),
      operations.map((one) => operationNode(document, ...one)),
    ]),
  );
}

function operationNode(document, path, method, operation) {
  const body = operation.requestBody?.content["application/json"]?.schema;
  const parameters = operation.parameters ?? [];
  return h(
    "details",
    null,
    h(
      "summary",
      null,
      h("span", { class: "method" }, method.toUpperCase()),
      h("code", null, path),
      " ",
      h("span", { class: "soft" }, operation.summary),
    ),
    operation.description && h("p", null, operation.description),
    parameters.length > 0 &&
      h(
        "ul",
        null,
        parameters.map((one) => h("li", null, h("code", null, one.name), ` in the ${one.in}`)),
      ),
    body && fields(document, body),
  );
}

function fields(document, schema, depth = 0) {
  const found = resolve(document, schema);
  if (!found.properties) return h("p", { class: "soft" }, kindOf(document, schema));
  const required = new Set(found.required ?? []);
  return h(
    "ul",
    null,
    Object.entries(found.properties).map(([name, one]) => {
      const inner = depth < 2 ? objectIn(document, one) : null;
      return h(
        "li",
        null,
        h("code", null, name),
        ` ${kindOf(document, one)}${required.has(name) ? ", needed" : ""}`,
        one.description && h("span", { class: "soft" }, ` ${one.description}`),
        inner && fields(document, inner, depth + 1),
      );
    }),
  );
}

const resolve = (document, schema) =>
  schema.$ref ? document.components.schemas[schema.$ref.split("/").pop()] : schema;

/** Return the schema of the object that a field holds, directly or in a list. */
function objectIn(document, schema) {
  const found = resolve(document, schema);
  if (found.properties) return found;
  if (found.items) return objectIn(document, found.items);
  for (const one of found.anyOf ?? found.oneOf ?? []) {
    const inner = objectIn(document, one);
    if (inner) return inner;
  }
  return null;
}

function kindOf(document, schema) {
  const several = schema.anyOf ?? schema.oneOf;
  if (several)
    return [...new Set(several.map((one) => kindOf(document, one)))].filter((one) => one !== "null").join(" or ");
  if (schema.enum) return schema.enum.map((one) => JSON.stringify(one)).join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.type === "array") return `list of ${schema.items ? kindOf(document, schema.items) : "anything"}`;
  return schema.type ?? "anything";
}

function askForKey(why) {
  const input = h("input", { type: "password", autocomplete: "off" });
  put(
    main,
    h("h1", null, "Cairn's API"),
    h("p", { class: "warn", role: "alert" }, why),
    h(
      "form",
      {
        onsubmit: (event) => {
          event.preventDefault();
          keys.user = input.value.trim();
          start();
        },
      },
      field("API key", input),
      h("button", { type: "submit", class: "primary" }, "Use it"),
    ),
  );
}

const start = () =>
  show().catch((error) =>
    error.status === 401 ? askForKey(error.message) : put(main, h("p", { class: "warn" }, error.message)),
  );
start();
