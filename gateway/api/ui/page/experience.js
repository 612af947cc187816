// Staleness, the experience buffer and what left it unused, and the prompt pool.

import { bar, byId, el, keyed, setText } from "./dom.js";
import { bytes, count, plural, seconds, share, short } from "./format.js";
import { waitItem } from "./waits.js";

const MOMENTS = [["generation", "When generated", "tokens"], ["finish", "When finished", "trajectories"], ["use", "When sampled", "trajectories"]];
const BEHIND_MAX = 6; // beyond it all together

export class Experience {
  constructor() {
    this.tables = ["gateway"];
    this.histograms = MOMENTS.map((moment) => new Histogram(...moment));
    byId("staleness").append(el("h3", {}, "Staleness, in versions"), el("div", { class: "histograms" }, ...this.histograms.map((one) => one.node)));
    this.fill = bar();
    this.buffer = el("dl", { class: "facts" });
    const evicted = el("ul", { class: "list" });
    byId("buffer").append(el("h3", {}, "Buffer"), this.fill.node, evicted, this.buffer);
    this.evictions = keyed(evicted, waitItem);
    this.pool = el("dl", { class: "facts" });
    byId("pool").append(el("h3", {}, "Prompt pool"), this.pool);
    this.bufferFacts = keyed(this.buffer, factItem);
    this.poolFacts = keyed(this.pool, factItem);
  }

  render(tables) {
    for (const histogram of this.histograms) histogram.render(tables.field("staleness"));
    const buffer = tables.field("buffer");
    this.fill.update(buffer.trajectories / Math.max(1, buffer.capacity), `${count(buffer.trajectories)} of ${count(buffer.capacity)}`);
    this.evictions(evictions(buffer), ({ text }) => text);
    this.bufferFacts(bufferFacts(buffer, tables.field("sampled")), ([name]) => name);
    const pool = tables.field("prompt_pool");
    this.poolFacts(
      [["tasks", count(pool.tasks)], ["samples leased", count(pool.leases)], ["finished", count(pool.finished)], ["failed", count(pool.failed)], ["leases expired", count(pool.expired)], ["given up", count(pool.given_up)]],
      ([name]) => name,
    );
  }
}

/** The mean of a histogram {value: number of}. */
export function meanOf(histogram) {
  const entries = Object.entries(histogram ?? {});
  const all = entries.reduce((total, [, n]) => total + n, 0);
  return all ? entries.reduce((total, [value, n]) => total + Number(value) * n, 0) / all : null;
}

/** Finished trajectories that no trainer used up, though nobody asked for that. */
export const lostWork = (buffer) => buffer.evicted_stale + buffer.evicted_for_room;

const EVICTIONS = [
  ["evicted_stale", "bad", "evicted unused, too stale: fewer runners, larger batches or a larger --staleness-max keep them"],
  ["evicted_for_room", "bad", "evicted unused, for room: trainers sample too little, or --experience-max is too small"],
  ["evicted_equal", "info", "evicted for the equal rewards of their groups, as a reader asked"],
  ["evicted_by_readers", "info", "evicted by readers"],
];

function evictions(buffer) {
  return EVICTIONS.filter(([name]) => buffer[name]).map(([name, kind, text]) => ({ kind, who: count(buffer[name]), text }));
}

function bufferFacts(buffer, sampled) {
  const facts = [
    ["leased", count(buffer.leased)],
    ["added", count(buffer.added)],
    ["used up", count(buffer.acked)],
    ["bytes", bytes(buffer.num_bytes)],
  ];
  if (sampled.reward.count) {
    facts.push(
      ["reward of those sampled", `${sampled.reward.mean.toFixed(3)} on the mean`],
      ["waited for a trainer", `${seconds(sampled.waited_s.p50)}, p99 ${seconds(sampled.waited_s.p99)}`],
      ["sampled tokens", `${short(sampled.sampled_tokens.mean)} on the mean, p99 ${short(sampled.sampled_tokens.p99)}`],
    );
  }
  return facts;
}

function factItem([name]) {
  const value = el("dd");
  return { node: el("div", {}, el("dt", {}, name), value), update: ([, text]) => setText(value, text) };
}

class Histogram {
  constructor(name, title, what) {
    this.name = name;
    this.what = what;
    this.mean = el("span", { class: "muted" });
    this.body = el("div");
    this.rows = keyed(this.body, histogramRow);
    this.node = el("div", { class: "histogram" }, el("h4", {}, title, " ", this.mean), this.body);
  }

  render(staleness) {
    const counts = staleness[this.name];
    const mean = meanOf(counts);
    setText(this.mean, mean === null ? `no ${this.what} yet` : `mean ${mean.toFixed(2)}`);
    const all = Object.values(counts).reduce((a, b) => a + b, 0);
    const by = new Map();
    for (const [behind, n] of Object.entries(counts)) {
      const at = Math.min(Number(behind), BEHIND_MAX);
      by.set(at, (by.get(at) ?? 0) + n);
    }
    const rows = [...by].sort(([a], [b]) => a - b).map(([behind, n]) => ({ behind, n, part: n / Math.max(1, all) }));
    this.rows(rows, (row) => row.behind);
  }
}

function histogramRow({ behind }) {
  const meter = bar();
  return {
    node: el("div", { class: "version-row" }, el("span", { class: "version-name" }, behind === BEHIND_MAX ? `${BEHIND_MAX}+` : String(behind)), meter.node),
    update: ({ n, part }) => meter.update(part, `${share(part)}, ${short(n)}`, behind === 0 ? "good" : "old"),
  };
}
