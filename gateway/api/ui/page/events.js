// The fleet's events, the newest first.

import { byId, el, keyed } from "./dom.js";
import { clock } from "./format.js";

const SHOWN_MAX = 120;
const LEFT_OUT = new Set(["seq", "t_unix_s", "kind", "engine", "state", "reason", "error"]);

export class Events {
  constructor() {
    this.tables = ["events"];
    this.list = keyed(byId("events"), eventItem);
  }

  render(tables) {
    this.list(tables.events.slice(-SHOWN_MAX).reverse(), (event) => event.seq);
  }
}

function eventItem(event) {
  const rest = Object.entries(event).filter(([name]) => !LEFT_OUT.has(name)).map(([name, value]) => `${name.replaceAll("_", " ")} ${plain(value)}`);
  const words = [event.state, event.reason, event.error, ...rest].filter(Boolean).join(", ");
  const node = el(
    "li",
    { class: `event ${event.kind}` },
    el("time", { class: "muted", datetime: new Date(event.t_unix_s * 1000).toISOString() }, clock(event.t_unix_s)),
    " ",
    el("span", { class: "kind" }, event.kind),
    " ",
    event.engine ? el("b", {}, event.engine) : "",
    ` ${words}`,
  );
  return { node, update() {} };
}

function plain(value) {
  if (typeof value === "number") return Number.isInteger(value) ? value : value.toFixed(2);
  return Array.isArray(value) ? value.join(", ") : typeof value === "object" ? JSON.stringify(value) : value;
}
