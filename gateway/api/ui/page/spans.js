// The model of the timeline: bands of engines, in each band slots, in each slot stays of sessions, in each stay phases.
//
// Invariants:
// - a live session has one open stay: on the engine where it runs or was last placed, or in the band of those without;
// - a slot has at most one open stay; a stay keeps its slot from its beginning to its end;
// - what ended before the time kept is forgotten, and at most SPANS_MAX phases are kept, the newest.

export const PHASES = ["decode", "prefill", "move", "queue", "tool", "idle", "reward"];
export const DOWN = new Set(["dead", "fenced", "suspected", "gone"]); // states of engines; in others they serve, or load
export const serves = ({ state }) => state === "serving" || state === "draining";
export const WAITING = ""; // the band of sessions that were never placed
const KEPT_S = 310;
const SPANS_MAX = 600_000;
const OPEN = Infinity;
const code = new Map(PHASES.map((phase, at) => [phase, at]));

class Stay {
  constructor(id, band, slot, t) {
    this.id = id;
    this.band = band;
    this.slot = slot;
    this.end = OPEN;
    this.times = []; // when each phase began
    this.codes = [];
    this.start = t;
  }
}

export class Band {
  constructor(name) {
    this.name = name;
    this.slots = []; // of stays, the oldest first
    this.free = []; // slots without an open stay, descending
    this.marks = []; // {t, version} where its version changed
    this.downs = []; // {start, end, kind}: it did not serve; "version": to load one, or "down"
    this.version = null;
    this.state = "";
    this.open = 0;
  }

  takeSlot() {
    const slot = this.free.length ? this.free.pop() : this.slots.push([]) - 1;
    this.open += 1;
    return slot;
  }

  giveSlot(slot) {
    let low = 0;
    for (let high = this.free.length; low < high; ) {
      const middle = (low + high) >> 1;
      if (this.free[middle] > slot) low = middle + 1;
      else high = middle;
    }
    this.free.splice(low, 0, slot);
    this.open -= 1;
  }
}

export class Spans {
  constructor() {
    this.bands = new Map();
    this.stays = new Map(); // the open one of each live session
    this.rows = new Map(); // the newest row of each live session
    this.gaps = []; // {start, end}: times without a connection
    this.num = 0; // phases kept
    this.t = 0;
    this.prunedAt = 0;
    this.counts = new Array(PHASES.length).fill(0); // of live sessions, by phase
  }

  band(name) {
    let found = this.bands.get(name);
    if (found === undefined) this.bands.set(name, (found = new Band(name)));
    return found;
  }

  /** Takes what a frame of time `t` changed of the sessions and the engines. */
  apply(t, sessions, engines) {
    this.t = t;
    for (const [name, engine] of engines?.set ?? []) this.setEngine(t, name, engine);
    for (const name of engines?.gone ?? []) this.setEngine(t, name, { state: "gone", version: null });
    for (const id of sessions?.gone ?? []) this.end(id, t);
    for (const [id, row] of sessions?.set ?? []) this.setSession(t, id, row);
    if (t - this.prunedAt > 1) this.prune(t);
  }

  /** The connection was lost at `start`, and is back. */
  gap(start, end) {
    this.gaps.push({ start, end });
  }

  setEngine(t, name, { state, version }) {
    const band = this.band(name);
    if (version !== null && version !== band.version) {
      if (band.version !== null) band.marks.push({ t, version });
      band.version = version;
    }
    const kind = DOWN.has(state) ? "down" : serves({ state }) ? "" : "version";
    const open = band.downs.at(-1)?.end === OPEN ? band.downs.at(-1) : undefined;
    if (open !== undefined && open.kind !== kind) open.end = t;
    if (kind && open?.kind !== kind) band.downs.push({ start: t, end: OPEN, kind });
    band.state = state;
  }

  setSession(t, id, row) {
    const [phase, engine, , since] = row;
    const at = code.get(phase) ?? PHASES.length - 1;
    let stay = this.stays.get(id);
    if (stay !== undefined && stay.band.name !== engine) {
      this.close(stay, t);
      stay = undefined;
    }
    if (stay === undefined) {
      const band = this.band(engine);
      const fresh = !this.rows.has(id);
      stay = new Stay(id, band, band.takeSlot(), fresh && since ? Math.max(since, t - KEPT_S) : t);
      this.keepFree(stay);
      band.slots[stay.slot].push(stay);
      this.stays.set(id, stay);
    }
    this.recount(id, row);
    const last = stay.codes.length - 1;
    if (last >= 0 && stay.codes[last] === at) return;
    const floor = last < 0 ? stay.start : stay.times[last];
    stay.times.push(Math.min(t, Math.max(floor, since || t)));
    stay.codes.push(at);
    this.num += 1;
  }

  /** A stay that began before it was seen begins no earlier than its slot was free. */
  keepFree(stay) {
    const before = stay.band.slots[stay.slot].at(-1);
    if (before !== undefined) stay.start = Math.max(stay.start, before.end);
  }

  recount(id, row) {
    const before = this.rows.get(id);
    if (before !== undefined) this.counts[code.get(before[0])] -= 1;
    if (row !== undefined) {
      this.counts[code.get(row[0])] += 1;
      this.rows.set(id, row);
    } else this.rows.delete(id);
  }

  close(stay, t) {
    stay.end = t;
    stay.band.giveSlot(stay.slot);
    this.stays.delete(stay.id);
  }

  end(id, t) {
    const stay = this.stays.get(id);
    if (stay !== undefined) this.close(stay, t);
    this.recount(id, undefined);
  }

  prune(t) {
    this.prunedAt = t;
    const kept = this.num > SPANS_MAX ? KEPT_S * (SPANS_MAX / this.num) : KEPT_S;
    const cut = t - kept;
    this.gaps = this.gaps.filter((gap) => gap.end > cut);
    for (const [name, band] of this.bands) {
      for (const stays of band.slots) this.pruneSlot(stays, cut);
      while (band.slots.length && band.slots.at(-1).length === 0) {
        band.slots.pop();
        if (band.free[0] === band.slots.length) band.free.shift();
      }
      band.marks = band.marks.filter((mark) => mark.t > cut);
      band.downs = band.downs.filter((down) => down.end > cut);
      if (band.state === "gone" && band.slots.length === 0) this.bands.delete(name);
    }
  }

  pruneSlot(stays, cut) {
    let gone = 0;
    while (gone < stays.length && stays[gone].end <= cut) this.num -= stays[gone++].codes.length;
    if (gone) stays.splice(0, gone);
    const first = stays[0];
    if (first === undefined || first.times.length < 2 || first.times[1] > cut) return;
    let old = 0;
    while (old + 1 < first.times.length && first.times[old + 1] <= cut) old += 1;
    first.times.splice(0, old);
    first.codes.splice(0, old);
    this.num -= old;
  }
}
