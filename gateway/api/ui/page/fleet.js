// Key figures, versions over engines, and each engine.

import { bar, byId, el, keyed, setText } from "./dom.js";
import { byName, count, plural, share, short } from "./format.js";

const SHOWN_MAX = 200;
const HISTORY = 120; // points of a sparkline
const SVG = "http://www.w3.org/2000/svg";
const ORDER = { dead: 0, fenced: 1, suspected: 2, joining: 3, refreshing: 4, draining: 5, serving: 6 };

const serves = (engine) => engine.state === "serving" || engine.state === "draining";
const sum = (rows, of) => rows.reduce((total, row) => total + of(row), 0);

/** The mean of a histogram {value: number of}. */
export function meanOf(histogram) {
  const entries = Object.entries(histogram ?? {});
  const all = sum(entries, ([, n]) => n);
  return all ? sum(entries, ([value, n]) => Number(value) * n) / all : null;
}

const TILES = [
  ["Tokens per second", (t) => t.field("tokens_per_s"), short, (t) => `${short(t.field("counters").tokens_generated)} since the start`],
  ["Live sessions", (t) => t.field("sessions").live, count, (t) => `${count(sum([...t.rows("engines").values()], (engine) => engine.running))} turns run, ${count(t.field("sessions").queued)} wait`],
  ["Engines serving", (t) => [...t.rows("engines").values()].filter(serves).length, count, (t) => `of ${count(t.rows("engines").size)}`],
  ["Newest version", (t) => t.field("newest_version"), count, (t) => `the trainer's is ${count(t.field("trainer_version"))}`],
  ["Staleness of tokens", (t) => meanOf(t.field("staleness").generation), (x) => (x === null ? "–" : x.toFixed(2)), () => "versions, mean"],
  ["KV in use", (t) => kv(t), share, () => "mean of serving engines"],
  ["Experience buffer", (t) => t.field("buffer").trajectories, count, (t) => `${count(t.field("buffer").leased)} leased`],
  ["Turns cut, lost", (t) => t.field("counters").turns_cut, count, (t) => `${count(t.field("counters").turns_resumed)} resumed, ${count(t.field("counters").turns_lost)} lost`],
];

function kv(tables) {
  const rows = [...tables.rows("engines").values()].filter(serves);
  return rows.length ? sum(rows, (engine) => engine.kv_usage) / rows.length : 0;
}

class Tile {
  constructor([title, value, show, note]) {
    Object.assign(this, { value, show, note, past: [] });
    this.number = el("dd", { class: "figure" });
    this.under = el("dd", { class: "muted" });
    this.curve = document.createElementNS(SVG, "polyline");
    const chart = document.createElementNS(SVG, "svg");
    for (const [name, to] of [["viewBox", `0 0 ${HISTORY - 1} 24`], ["preserveAspectRatio", "none"], ["class", "spark"], ["aria-hidden", "true"]]) chart.setAttribute(name, to);
    chart.append(this.curve);
    this.node = el("dl", { class: "card tile" }, el("dt", {}, title), this.number, this.under, chart);
  }

  render(tables) {
    const value = this.value(tables);
    setText(this.number, this.show(value));
    setText(this.under, this.note(tables));
    this.past.push(value ?? 0);
    if (this.past.length > HISTORY) this.past.shift();
    const most = Math.max(...this.past, 1e-9);
    const begin = HISTORY - this.past.length;
    this.curve.setAttribute("points", this.past.map((v, at) => `${begin + at},${(23 - (22 * v) / most).toFixed(1)}`).join(" "));
  }
}

export class Fleet {
  constructor() {
    this.tables = ["gateway", "engines"];
    this.tiles = TILES.map((tile) => new Tile(tile));
    byId("tiles").append(...this.tiles.map((tile) => tile.node));
    this.versions = keyed(byId("versions"), versionRow);
    this.engines = keyed(byId("engines"), engineRow);
    byId("engine-filter").addEventListener("input", () => this.last && this.renderEngines(this.last));
  }

  render(tables) {
    this.last = tables;
    for (const tile of this.tiles) tile.render(tables);
    this.renderVersions(tables);
    this.renderEngines(tables);
  }

  renderVersions(tables) {
    const by = new Map();
    for (const engine of tables.rows("engines").values()) {
      if (!by.has(engine.version)) by.set(engine.version, { version: engine.version, serving: 0, other: 0, running: 0 });
      const found = by.get(engine.version);
      if (serves(engine)) found.serving += 1;
      else found.other += 1;
      found.running += engine.running;
    }
    const all = tables.rows("engines").size;
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
      setText(cells.name, engine.name);
      setText(cells.state, engine.state);
      cells.state.className = `chip ${engine.state}`;
      const reason = engine.last_error || (engine.intake === "closed" ? engine.reason : "");
      setText(why, reason);
      why.title = reason;
      setText(cells.version, engine.available > engine.version ? `${engine.version} of ${engine.available}` : engine.version);
      setText(cells.intake, `${engine.intake}, ${engine.admitted}`);
      turns.update((engine.running + engine.waiting) / engine.most, engine.waiting ? `${engine.running} + ${engine.waiting}` : engine.running);
      kvBar.update(engine.kv_usage, share(engine.kv_usage), engine.kv_usage > 0.9 ? "bad" : "");
    },
  };
}
