// A list that keeps only visible rows in the document, so that its cost does not grow with its length.

import { framed, h } from "/web/dom.js";

const SPARE = 8;

export class VirtualList {
  /** Make a list. `make(row, index)` returns a row's element, `height` pixels high. */
  constructor(box, height, make) {
    this.box = box;
    this.height = height;
    this.make = make;
    this.rows = [];
    this.room = h("div", { class: "room", role: "none" });
    box.append(this.room);
    this.draw = framed(() => this.drawn());
    box.addEventListener("scroll", this.draw, { passive: true });
    this.watch = new ResizeObserver(this.draw);
    this.watch.observe(box);
  }

  end() {
    this.watch.disconnect();
  }

  show(rows) {
    this.rows = rows;
    this.draw();
  }

  drawn() {
    const { height, box, rows, room } = this;
    room.style.setProperty("height", `${rows.length * height}px`);
    const first = Math.max(0, Math.floor(box.scrollTop / height) - SPARE);
    const last = Math.min(rows.length, Math.ceil((box.scrollTop + box.clientHeight) / height) + SPARE);
    this.range = [first, last];
    const made = [];
    for (let at = first; at < last; at++) {
      const node = this.make(rows[at], at);
      node.style.setProperty("transform", `translateY(${at * height}px)`);
      made.push(node);
    }
    room.replaceChildren(...made);
    this.ondrawn?.(first, last);
  }

  /** Scroll to a row. */
  reveal(at) {
    const { box, height } = this;
    const top = at * height;
    if (top < box.scrollTop) box.scrollTop = top;
    else if (top + height > box.scrollTop + box.clientHeight) box.scrollTop = top + height - box.clientHeight;
  }
}
