// Elements without HTML: every text becomes a text node, so nothing that is shown can be a tag or a script.

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

/** An element: `h("p", {class: "x", onclick: f}, "text", other)`. */
export const h = (tag, props, ...children) => fill(document.createElement(tag), props, children);

/** The same for a picture. */
export const svg = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);

/** Put these in the place of all that a node holds. */
export const put = (node, ...children) => node.replaceChildren(...children.flat(Infinity).filter((one) => one));

/** A button. */
export const button = (text, onclick, props) => h("button", { type: "button", onclick, ...props }, text);

/** A field with its label. */
export const field = (label, input, hint) =>
  h("label", { class: "field" }, h("span", null, label), input, hint && h("small", null, hint));

/** Say something to who hears the page. */
export function say(text) {
  document.getElementById("said").textContent = text;
}

/** Call `f` once before the next frame, however often this is called; a page that is not shown has no frames. */
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

/** Ask in a dialog; `make(close)` gives what it holds. Escape closes it, and what had the focus gets it again. */
export function dialog(title, make) {
  const node = h("dialog", { "aria-label": title, onclose: () => node.remove() });
  node.append(h("h2", null, title), ...[make(() => node.close())].flat());
  document.body.append(node);
  node.showModal();
  return node;
}

/** Whether they are sure. */
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

/** Close the list of a narrow page once something in it was chosen, the one that is shown included. */
export function closesList(event) {
  if (event.target.closest(".side a")) event.currentTarget.classList.remove("open");
}

/** Say what went wrong: in the dialog that is open, for all else is behind it, or for a while at the edge. */
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
