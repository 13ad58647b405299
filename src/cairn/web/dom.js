// DOM elements without HTML: texts become text nodes, so that no shown text can act as a tag or a script.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false));
  return node;
}

/** Make an element: `h("p", {class: "x", onclick: f}, "text", other)`. */
export const h = (tag, props, ...children) => fill(document.createElement(tag), props, children);

/** Make an SVG element, as `h` does. */
export const svg = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);

/** Replace all children of a node. */
export const put = (node, ...children) => node.replaceChildren(...children.flat(Infinity).filter((one) => one));

/** Make a button. */
export const button = (text, onclick, props) => h("button", { type: "button", onclick, ...props }, text);

/** Make a form field with its label. */
export const field = (label, input, hint) =>
  h("label", { class: "field" }, h("span", null, label), input, hint && h("small", null, hint));

/** Announce a text to screen readers. */
export function say(text) {
  document.getElementById("said").textContent = text;
}

/** Return a function that calls `f` once before the next frame, however often it is called. Hidden pages have no frames. */
export function framed(f) {
  let due = false;
  return () => {
    if (due) return;
    due = true;
    const run = () => {
      if (due) {
        due = false;
        f();
      }
    };
    if (document.hidden) setTimeout(run, 200);
    else requestAnimationFrame(run);
  };
}

/** Open a dialog with the content of `make(close)`. Escape closes it; the focus then returns to where it was. */
export function dialog(title, make) {
  const node = h("dialog", { "aria-label": title, onclose: () => node.remove() });
  node.append(h("h2", null, title), ...[make(() => node.close())].flat());
  document.body.append(node);
  node.showModal();
  return node;
}

/** Ask for confirmation; resolve to true or false. */
export function sure(title, text, yes) {
  return new Promise((resolve) => {
    let answer = false;
    const node = dialog(title, (close) => [
      h("p", null, text),
      h(
        "div",
        { class: "row end" },
        button("No", close),
        button(
          yes,
          () => {
            answer = true;
            close();
          },
          { class: "danger" },
        ),
      ),
    ]);
    node.addEventListener("close", () => resolve(answer));
  });
}

/** Close the side list of a narrow page when an item is chosen, even the one already shown. */
export function closesList(event) {
  if (event.target.closest(".side a")) event.currentTarget.classList.remove("open");
}

/** Show an error: in the open dialog if there is one, else for a while at the page's edge. */
export function complain(error) {
  const text = error?.message ?? String(error);
  const open = [...document.querySelectorAll("dialog[open]")].at(-1);
  if (open) {
    open.querySelector(".wrong")?.remove();
    open.append(h("p", { class: "warn wrong", role: "alert" }, text));
    return;
  }
  const node = h(
    "div",
    { class: "toast", role: "alert" },
    h("span", null, text),
    button("×", () => node.remove(), { class: "quiet", "aria-label": "Dismiss" }),
  );
  document.body.append(node);
  setTimeout(() => node.remove(), 12000);
}
