// The key figures and those of the timeline's legend: of one moment, so that they agree.

import { byId, curve, el, setText } from "./dom.js";
import { count, share, short } from "./format.js";
import { lostWork, meanOf } from "./experience.js";
import { DOWN, PHASES, serves } from "./spans.js";

const HISTORY = 120; // points of a sparkline
const PHASE_TEXT = { decode: "Decode", prefill: "Prefill", move: "Move", queue: "Queue", tool: "Tool", idle: "Idle", reward: "Reward" };
const MARK_TEXT = { version: "Version", down: "Down" };

const sum = (rows, of) => rows.reduce((total, row) => total + of(row), 0);

// What each has: its title, its value, how that is shown, a note, and what is wrong with it, if anything is.
const TILES = [
  ["Tokens per second", (t) => t.field("tokens_per_s"), short, (t) => `${short(t.field("counters").tokens_generated)} since the start`],
  ["Live sessions", (t, phases) => sum([...phases.values()], (n) => n), count, (t, phases) => `${count(phases.get("decode") + phases.get("prefill"))} on engines, ${count(phases.get("queue") + phases.get("move"))} wait`, (t, phases) => phases.get("idle") && `${count(phases.get("idle"))} idle`],
  ["Engines serving", (t) => [...t.rows("engines").values()].filter(serves).length, count, (t) => `of ${count(t.rows("engines").size)}`, (t) => down(t)],
  ["Newest version", (t) => t.field("newest_version"), count, (t) => `the trainer's is ${count(t.field("trainer_version"))}`],
  ["Staleness of tokens", (t) => meanOf(t.field("staleness").generation), (x) => (x === null ? "–" : x.toFixed(2)), () => "versions, mean"],
  ["KV in use", (t) => kv(t), share, () => "mean of serving engines"],
  ["Experience buffer", (t) => t.field("buffer").trajectories, count, (t) => `${count(t.field("buffer").leased)} leased`, (t) => lostWork(t.field("buffer")) && `${count(lostWork(t.field("buffer")))} evicted unused`],
  ["Turns cut", (t) => t.field("counters").turns_cut, count, (t) => `${count(t.field("counters").turns_resumed)} resumed`, (t) => t.field("counters").turns_lost && `${count(t.field("counters").turns_lost)} lost`],
];

/** Engines that should serve and do not, by state. */
function down(tables) {
  const by = new Map();
  for (const { state } of tables.rows("engines").values()) if (DOWN.has(state)) by.set(state, (by.get(state) ?? 0) + 1);
  return [...by].map(([state, n]) => `${count(n)} ${state}`).join(", ");
}

function kv(tables) {
  const rows = [...tables.rows("engines").values()].filter(serves);
  return rows.length ? sum(rows, (engine) => engine.kv_usage) / rows.length : 0;
}

class Tile {
  constructor([title, value, show, note, wrong = () => ""]) {
    Object.assign(this, { value, show, note, wrong, past: [] });
    this.number = el("dd", { class: "figure" });
    this.under = el("dd", { class: "muted" });
    this.alarm = el("dd", { class: "alarm" });
    this.curve = curve(HISTORY - 1, 24, { class: "spark", "aria-hidden": "true" });
    this.node = el("dl", { class: "card tile" }, el("dt", {}, title), this.number, this.under, this.alarm, this.curve.node);
  }

  render(tables, phases) {
    const value = this.value(tables, phases);
    setText(this.number, this.show(value));
    setText(this.under, this.note(tables, phases));
    setText(this.alarm, this.wrong(tables, phases) || "");
    this.past.push(value ?? 0);
    if (this.past.length > HISTORY) this.past.shift();
    const most = Math.max(...this.past, 1e-9);
    const begin = HISTORY - this.past.length;
    this.curve.draw(this.past.map((v, at) => [begin + at, 23 - (22 * v) / most]));
  }
}

const swatch = (kind) => el("span", { class: `swatch ${kind}`, "aria-hidden": "true" });

export class Figures {
  /** `counts`: live sessions by phase, as the timeline has them. */
  constructor(counts) {
    this.tables = ["gateway", "engines", "sessions"];
    this.counts = counts;
    this.tiles = TILES.map((tile) => new Tile(tile));
    byId("tiles").append(...this.tiles.map((tile) => tile.node));
    this.numbers = PHASES.map(() => el("b", {}, "0"));
    byId("legend").append(
      ...PHASES.map((phase, at) => el("li", {}, swatch(phase), `${PHASE_TEXT[phase]} `, this.numbers[at])),
      ...Object.entries(MARK_TEXT).map(([mark, text]) => el("li", {}, swatch(mark), text)),
    );
  }

  render(tables) {
    const phases = new Map(PHASES.map((phase, at) => [phase, this.counts[at]]));
    for (const tile of this.tiles) tile.render(tables, phases);
    PHASES.forEach((phase, at) => setText(this.numbers[at], count(this.counts[at])));
  }
}
