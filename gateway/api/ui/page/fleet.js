// Versions over engines, and each engine.

import { bar, byId, el, keyed, setText } from "./dom.js";
import { byName, plural, share } from "./format.js";
import { serves } from "./spans.js";

const SHOWN_MAX = 200;
const ORDER = { dead: 0, fenced: 1, suspected: 2, joining: 3, refreshing: 4, draining: 5, serving: 6 };

export class Fleet {
  constructor() {
    this.tables = ["gateway", "engines"];
    this.versions = keyed(byId("versions"), versionRow);
    this.engines = keyed(byId("engines"), engineRow);
    byId("engine-filter").addEventListener("input", () => this.last && this.renderEngines(this.last));
  }

  render(tables) {
    this.last = tables;
    this.renderVersions(tables);
    this.renderEngines(tables);
  }

  renderVersions(tables) {
    const by = new Map();
    const alive = [...tables.rows("engines").values()].filter((engine) => engine.state !== "dead");
    for (const engine of alive) {
      if (!by.has(engine.version)) by.set(engine.version, { version: engine.version, serving: 0, other: 0, running: 0 });
      const found = by.get(engine.version);
      if (serves(engine)) found.serving += 1;
      else found.other += 1;
      found.running += engine.running;
    }
    const all = alive.length;
    const newest = Math.max(tables.field("newest_version"), ...by.keys());
    const rows = [...by.values()].sort((a, b) => b.version - a.version).map((row) => ({ ...row, all, newest }));
    this.versions(rows, (row) => row.version);
  }

  renderEngines(tables) {
    const wanted = byId("engine-filter").value.trim().toLowerCase();
    const rows = [...tables.rows("engines").values()]
      .filter((engine) => !wanted || engine.name.toLowerCase().includes(wanted) || engine.state.includes(wanted))
      .sort((a, b) => (ORDER[a.state] ?? 9) - (ORDER[b.state] ?? 9) || byName(a.name, b.name));
    const most = Math.max(8, ...rows.map((engine) => engine.running + engine.waiting));
    this.engines(rows.slice(0, SHOWN_MAX).map((engine) => ({ ...engine, most })), (engine) => engine.name);
    const hidden = rows.length - SHOWN_MAX;
    setText(byId("engines-note"), hidden > 0 ? `and ${plural(hidden, "engine")} more: filter them by name or state` : rows.length ? "" : wanted ? "no engine matches" : "no engine yet: name one with --engine");
  }
}

function versionRow() {
  const name = el("span", { class: "version-name" });
  const meter = bar();
  return {
    node: el("div", { class: "version-row" }, name, meter.node),
    update({ version, serving, other, running, all, newest }) {
      setText(name, `v${version}`);
      const away = other ? `, ${other} not serving` : "";
      meter.update((serving + other) / Math.max(1, all), `${plural(serving, "engine")}${away}, ${plural(running, "turn")}`, version === newest ? "good" : "old");
    },
  };
}

function engineRow() {
  const cells = { name: el("th", { scope: "row" }), state: el("span", { class: "chip" }), version: el("td", { class: "num" }), intake: el("td") };
  const turns = bar();
  const kvBar = bar();
  const why = el("span", { class: "why muted" });
  const node = el("tr", {}, cells.name, el("td", {}, cells.state, why), cells.version, cells.intake, el("td", {}, turns.node), el("td", {}, kvBar.node));
  return {
    node,
    update(engine) {
      const dead = engine.state === "dead";
      node.className = dead ? "dead" : "";
      setText(cells.name, engine.name);
      setText(cells.state, engine.state);
      cells.state.className = `chip ${engine.state}`;
      const reason = engine.last_error || (engine.intake === "closed" ? engine.reason : "");
      setText(why, reason);
      why.title = reason;
      setText(cells.version, engine.available > engine.version ? `${engine.version} of ${engine.available}` : engine.version);
      setText(cells.intake, dead ? "–" : `${engine.intake}, ${engine.admitted}`);
      turns.update((engine.running + engine.waiting) / engine.most, dead ? "–" : engine.waiting ? `${engine.running} + ${engine.waiting}` : engine.running);
      kvBar.update(engine.kv_usage, dead ? "–" : share(engine.kv_usage), engine.kv_usage > 0.9 ? "bad" : "");
    },
  };
}
