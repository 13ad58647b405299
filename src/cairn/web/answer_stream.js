// Reading the streamed answer of a turn to its end, reconnecting when a connection breaks.

import { ApiError, ask, events } from "/web/api.js";
import { h } from "/web/dom.js";
import { count } from "/web/format.js";

let speed = 0; // tokens of a prompt a second, as of the last answer

/** A streamed answer. */
export class AnswerStream {
  constructor(answer) {
    this.answer = answer;
    this.control = new AbortController();
    this.request = ""; // its id, once that is known
    this.begun = false; // whether it was let in
    this.failed = false; // whether the server said that it ended early
    this.seen = ""; // the last event
    this.facts = null; // what is known once it is over
    this.timer = 0;
  }

  /** Read the answer to its end; after a broken connection, reconnect and read the rest. */
  async hear(response) {
    const { answer } = this;
    this.request ||= response.headers.get("x-request-id") ?? "";
    for (let tries = 0; ; tries++) {
      try {
        if (await this.read(response)) return;
        throw new Error("the connection broke");
      } catch (error) {
        if (this.control.signal.aborted || this.failed || tries > 40) throw error;
        answer.told(h("span", null, "The connection broke; waiting for the server …"));
        response = await this.comeBack(tries, error);
        answer.told();
      }
    }
  }

  async comeBack(tries, error) {
    await new Promise((done) => setTimeout(done, Math.min(3000, 250 * 2 ** tries)));
    try {
      const headers = this.seen ? { "Last-Event-ID": this.seen } : {};
      return await ask("GET", `/v1/requests/${this.request}/events`, undefined, {
        headers,
        signal: this.control.signal,
      });
    } catch (again) {
      if (again instanceof ApiError && again.status < 500) throw error; // a server that knows it no more
      if (again instanceof ApiError || again instanceof TypeError) {
        if (tries > 40) throw error;
        return this.comeBack(tries + 1, error);
      }
      throw again;
    }
  }

  /** Read one connection's events; return whether the answer has ended. */
  async read(response) {
    const { answer } = this;
    let timings = null;
    let shown = 0;
    for await (const { id, data } of events(response)) {
      if (id) this.seen = id;
      this.begun = true;
      if (data === "[DONE]") {
        this.facts = { timings };
        return true;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) {
        this.failed = true;
        throw new ApiError(chunk.error.code === "cancelled" ? 499 : 500, chunk);
      }
      if (chunk.prompt_progress) this.prefill(chunk.prompt_progress);
      timings = chunk.timings ?? timings;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      const delta = choice.delta;
      if (delta?.content || delta?.reasoning_content || delta?.tool_calls) {
        if (!shown) this.stopTimer();
        answer.add(delta);
        if (timings?.predicted_n > 1 && performance.now() - shown > 300) {
          shown = performance.now();
          answer.told(
            h(
              "span",
              { class: "soft" },
              `${count(timings.predicted_n)} tokens, ${timings.predicted_per_second.toFixed(1)} tokens/s`,
            ),
          );
        }
        shown ||= 1;
      }
    }
    return false;
  }

  /** Show the prompt's progress, with the time left estimated from the progress so far. */
  prefill({ total, cache, processed, time_ms }) {
    const { answer } = this;
    const told = performance.now();
    if (processed > cache && time_ms) speed = (1000 * (processed - cache)) / time_ms;
    const text = `Reading ${count(total)} tokens`;
    this.stopTimer();
    if (processed === total) return;
    const show = () => {
      const since = (performance.now() - told) / 1000;
      const part = Math.min(0.97, (processed + since * (speed || 0)) / total);
      answer.progress(`${text}, ${(time_ms / 1000 + since).toFixed(0)} s`, part);
    };
    show();
    this.timer = setInterval(show, 500);
  }

  stopTimer() {
    clearInterval(this.timer);
    this.timer = 0;
  }

  /** Record the end. */
  end() {
    this.stopTimer();
    const timings = this.facts?.timings;
    if (timings?.prompt_n > 32) speed = timings.prompt_per_second;
  }
}
