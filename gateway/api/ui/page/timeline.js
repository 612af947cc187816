// The timeline on its canvas: what is in view, and how it is drawn. `controls.js` has what keys and pointers do to it.

import { byId, setText } from "./dom.js";
import { byName, plural, seconds } from "./format.js";
import { layout, paint, stayAt } from "./paint.js";
import { DOWN, PHASES, WAITING } from "./spans.js";
import { theme } from "./theme.js";

export const ROWS = [1, 2, 4, 8, 14]; // heights of a row in CSS pixels
const FITTING = [14, 10, 8, 6, 4, 3];
const AXIS = 20;
const LEAST = 4; // height of a band
const HEAD = 16; // the same with rows, for its label
const DRAW_MS = 40; // between two pictures, at least

export class Timeline {
  constructor(spans) {
    this.spans = spans;
    this.box = byId("timeline");
    this.canvas = byId("canvas");
    this.context = this.canvas.getContext("2d", { alpha: false });
    this.thumb = byId("thumb");
    this.status = byId("timeline-status");
    this.spanS = 120;
    this.rows = 0; // 0: fit, else one of ROWS
    this.top = 0; // scrolled by so many device pixels
    this.pausedAt = null;
    this.selected = null; // a session's name
    this.hover = null;
    this.dirty = true;
    this.drawnAt = 0;
    this.drawnNow = 0;
    this.frameAt = performance.now();
    this.live = false;
    this.bands = [];
    new ResizeObserver(() => this.resize()).observe(this.box);
    theme.onChange(() => (this.dirty = true));
    this.resize();
  }

  // -- what comes in

  /** A frame was taken; the model is new. */
  changed() {
    this.frameAt = performance.now();
    this.dirty = true;
  }

  setLive(live) {
    this.live = live;
    this.dirty = true;
  }

  select(id) {
    this.selected = id;
    this.dirty = true;
    this.tell();
  }

  /** The time at the right edge, by the gateway's clock. It stands still while nothing comes. */
  now() {
    if (this.pausedAt !== null) return this.pausedAt;
    return this.spans.t + (this.live ? Math.min(1, (performance.now() - this.frameAt) / 1000) : 0);
  }

  // -- drawing

  /** Draws if there is something new to see. Called once for each frame of the display. */
  frame(ms) {
    if (ms - this.drawnAt < DRAW_MS) return;
    const moved = Math.abs(this.now() - this.drawnNow) * this.pxPerS >= 1;
    if (!this.dirty && !moved) return;
    this.drawnAt = ms;
    this.dirty = false;
    this.draw();
  }

  resize() {
    const { width, height } = this.box.getBoundingClientRect();
    if (width < 1) return;
    this.dpr = Math.min(2, window.devicePixelRatio || 1);
    this.gutter = Math.round((width < 600 ? 64 : 124) * this.dpr);
    this.canvas.width = Math.round(width * this.dpr);
    this.canvas.height = Math.round(height * this.dpr);
    this.plotWidth = Math.max(1, this.canvas.width - this.gutter);
    this.plotHeight = Math.max(1, this.canvas.height - Math.round(AXIS * this.dpr));
    this.image = new ImageData(this.plotWidth, this.plotHeight);
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.dirty = true;
  }

  get pxPerS() {
    return this.plotWidth / this.spanS;
  }

  /** Row height in device pixels; 0: shares. */
  rowPx() {
    if (this.rows) return Math.round(this.rows * this.dpr);
    const slots = this.bands.reduce((sum, band) => sum + Math.max(band.slots.length, 1) + 1, 0);
    const fits = FITTING.find((row) => slots * row * this.dpr <= this.plotHeight && this.bands.length * HEAD * this.dpr <= this.plotHeight);
    return fits === undefined ? 0 : Math.round(fits * this.dpr);
  }

  draw() {
    const { context, dpr } = this;
    const now = (this.drawnNow = this.now());
    this.bands = [...this.spans.bands.values()]
      .filter((band) => band.name !== WAITING || band.slots.length)
      .sort((a, b) => (a.name === WAITING ? -1 : b.name === WAITING ? 1 : byName(a.name, b.name)));
    const row = (this.row = this.rowPx());
    this.placed = layout(this.bands, row, this.plotHeight, Math.round((row ? HEAD : LEAST) * dpr));
    const last = this.placed.at(-1);
    this.content = last === undefined ? 0 : last.y + last.height;
    this.top = Math.max(0, Math.min(this.top, this.content - this.plotHeight));
    const view = (this.view = { left: now - this.spanS, now, pxPerS: this.pxPerS, width: this.plotWidth, top: this.top, height: this.plotHeight });
    context.fillStyle = theme.css("--panel");
    context.fillRect(0, 0, this.canvas.width, this.canvas.height);
    paint(this.pixels, view, this.placed, row, theme.pixels(PHASES));
    context.putImageData(this.image, this.gutter, 0);
    this.drawDowns(view);
    this.drawGaps(view);
    this.drawSelection(view, row);
    this.drawLabels();
    this.drawAxis(view);
    this.drawThumb();
  }

  /** Where engines loaded or were down, and where their versions changed. */
  drawDowns(view) {
    const { context, dpr } = this;
    context.save();
    context.beginPath();
    context.rect(this.gutter, 0, this.plotWidth, this.plotHeight);
    context.clip();
    for (const { band, y, height } of this.inView()) {
      const at = y - view.top;
      for (const down of band.downs) {
        const from = this.x(down.start);
        const to = this.x(Math.min(down.end, view.now));
        if (to <= this.gutter) continue;
        const isDown = down.kind === "down";
        context.fillStyle = theme.css(isDown ? "--bad" : "--version");
        context.globalAlpha = isDown ? 0.6 : 0.35;
        context.fillRect(from, at, Math.max(2 * dpr, to - from), height - 1);
        context.globalAlpha = 1;
      }
      for (const mark of band.marks) {
        const px = this.x(mark.t);
        if (px < this.gutter) continue;
        context.fillStyle = theme.css("--version");
        context.fillRect(px, at, 2 * dpr, height - 1);
        if (height >= 13 * dpr && this.bands.length < 60) this.text(`v${mark.version}`, px + 4 * dpr, at + 10 * dpr, "--text", 10);
      }
    }
    context.restore();
  }

  drawGaps(view) {
    const open = this.live || this.lostAt === undefined ? [] : [{ start: this.lostAt, end: view.now }];
    for (const { start, end } of [...this.spans.gaps, ...open]) {
      const from = Math.max(this.gutter, this.x(start));
      const to = Math.min(this.canvas.width, this.x(end));
      if (to <= from) continue;
      this.context.globalAlpha = 0.75;
      this.context.fillStyle = theme.css("--panel");
      this.context.fillRect(from, 0, to - from, this.plotHeight);
      this.context.globalAlpha = 1;
      this.context.fillStyle = theme.css("--bad");
      this.context.fillRect(from, 0, this.dpr, this.plotHeight);
      this.context.fillRect(to - this.dpr, 0, this.dpr, this.plotHeight);
    }
  }

  drawSelection(view, row) {
    const stay = this.selected === null ? undefined : this.spans.stays.get(this.selected);
    const placed = stay && this.placed.find(({ band }) => band === stay.band);
    if (!placed || row === 0) return;
    const y = placed.y + stay.slot * row - view.top;
    this.context.strokeStyle = theme.css("--text");
    this.context.lineWidth = 1.5 * this.dpr;
    const from = Math.max(this.gutter, this.x(stay.start));
    this.context.strokeRect(from, y - this.dpr, this.canvas.width - from - 2 * this.dpr, row + this.dpr);
  }

  /** Where not all names have room, those of engines that are down have it first. */
  drawLabels() {
    const line = 12 * this.dpr;
    const taken = [];
    const down = ({ band }) => DOWN.has(band.state);
    for (const placed of this.inView().sort((a, b) => down(b) - down(a))) {
      const { band, y, height } = placed;
      const least = Math.max(0, y - this.view.top);
      const at = down(placed) ? Math.min(least, this.plotHeight - line) : least;
      if (at + line > this.plotHeight || taken.some((other) => Math.abs(other - at) < line)) continue;
      taken.push(at);
      const base = at + (height < 14 * this.dpr ? 9 : 11) * this.dpr;
      const room = this.gutter - 10 * this.dpr;
      const version = down(placed) && room > 90 * this.dpr ? band.state : band.version === null ? "" : `v${band.version}`;
      this.text(band.name === WAITING ? "waiting" : band.name, 4 * this.dpr, base, down(placed) ? "--bad" : "--text", 11, room - version.length * 7 * this.dpr);
      if (version) this.text(version, this.gutter - (version.length * 6.2 + 6) * this.dpr, base, down(placed) ? "--bad" : "--muted", 10);
    }
  }

  drawAxis(view) {
    const step = this.spanS <= 30 ? 5 : this.spanS <= 120 ? 20 : 30;
    const y = this.canvas.height - 6 * this.dpr;
    this.context.fillStyle = theme.css("--line");
    this.context.fillRect(0, this.plotHeight, this.canvas.width, this.dpr);
    for (let back = step; back < this.spanS; back += step) {
      const px = this.x(view.now - back);
      if (px > this.canvas.width - 64 * this.dpr) continue; // "now" stands there
      this.context.fillStyle = theme.css("--line");
      this.context.fillRect(px, this.plotHeight, this.dpr, 4 * this.dpr);
      this.text(`−${Math.floor(back / 60)}:${String(back % 60).padStart(2, "0")}`, px - 11 * this.dpr, y, "--muted", 10);
    }
    this.text(this.pausedAt === null ? "now" : "paused", this.canvas.width - 40 * this.dpr, y, "--muted", 10);
  }

  text(words, px, py, color, size, most) {
    this.context.font = `${size * this.dpr}px system-ui, sans-serif`;
    this.context.fillStyle = theme.css(color);
    let shown = words;
    if (most !== undefined && this.context.measureText(shown).width > most) {
      const fits = Math.floor((shown.length * most) / this.context.measureText(shown).width) - 1;
      shown = `${shown.slice(0, Math.max(1, fits))}…`;
    }
    this.context.fillText(shown, px, py);
  }

  drawThumb() {
    const over = this.content > this.plotHeight;
    if (this.thumb.hidden === over) this.thumb.hidden = !over;
    if (!over) return;
    const scale = this.plotHeight / this.content / this.dpr;
    this.thumb.style.height = `${Math.max(24, this.plotHeight * scale)}px`;
    this.thumb.style.top = `${Math.min(this.top * scale, this.plotHeight / this.dpr - 24)}px`;
  }

  x(t) {
    return this.gutter + Math.round((t - this.view.left) * this.view.pxPerS);
  }

  inView() {
    return this.placed.filter(({ y, height }) => y + height > this.top && y < this.top + this.plotHeight);
  }

  // -- what is chosen

  setRows(rows) {
    this.rows = rows;
    this.dirty = true;
  }

  step(by) {
    const at = this.rows ? ROWS.indexOf(this.rows) + by : by > 0 ? 2 : -1;
    this.setRows(at < 0 ? 0 : ROWS[Math.min(at, ROWS.length - 1)]);
  }

  setSpan(spanS) {
    this.spanS = spanS;
    this.dirty = true;
  }

  togglePause() {
    this.pausedAt = this.pausedAt === null ? this.now() : null;
    this.dirty = true;
  }

  scroll(by) {
    const before = this.top;
    this.top = Math.max(0, Math.min(this.content - this.plotHeight, this.top + by));
    this.dirty ||= this.top !== before;
    return this.top !== before;
  }

  /** Chooses the next live session in the order of the bands and their slots. */
  walk(by) {
    const order = this.bands.flatMap((band) => band.slots.map((stays) => stays.at(-1)).filter((stay) => stay?.end === Infinity));
    if (!order.length) return;
    const at = order.findIndex((stay) => stay.id === this.selected);
    const stay = order[at < 0 ? 0 : (at + by + order.length) % order.length];
    this.select(stay.id);
    if (!this.row) this.setRows(8);
    this.draw();
    this.bringIntoView(stay);
  }

  bringIntoView(stay) {
    const placed = this.placed.find(({ band }) => band === stay.band);
    const y = placed.y + stay.slot * this.row;
    if (y < this.top || y + this.row > this.top + this.plotHeight) this.scroll(y - this.plotHeight / 2 - this.top);
  }

  /** The thumb was moved by so many CSS pixels. */
  drag(by) {
    this.scroll((by * this.content * this.dpr) / this.plotHeight);
  }

  /** Shows the rows of an engine. */
  goTo(band) {
    this.setRows(4);
    this.draw();
    this.top = 0;
    this.scroll(this.placed.find((one) => one.band === band).y);
  }

  at(event) {
    const { left, top } = this.box.getBoundingClientRect();
    const px = (event.clientX - left) * this.dpr - this.gutter;
    const py = (event.clientY - top) * this.dpr;
    if (this.placed === undefined || px < 0 || py >= this.plotHeight) return { band: null, stay: null };
    return stayAt(this.view, this.placed, this.row, px, py);
  }

  setHover(hover) {
    this.hover = hover;
    this.tell();
  }

  /** Puts into words what is chosen or pointed at. */
  tell() {
    setText(this.status, this.hover?.band ? this.ofBand(this.hover.band) : this.ofSession(this.hover?.id ?? this.selected));
  }

  ofBand(band) {
    if (band.name === WAITING) return `${plural(band.open, "session")} without an engine yet`;
    const version = band.version === null ? "" : `, version ${band.version}`;
    return `${band.name}: ${band.state}${version}, ${plural(band.open, "session")}`;
  }

  ofSession(id) {
    if (id === null || id === undefined) return "";
    const row = this.spans.rows.get(id);
    if (row === undefined) return `${id}: has ended`;
    const [phase, engine, version, since, turns, , moves] = row;
    const stay = this.spans.stays.get(id);
    const began = since || stay?.times.at(-1) || this.spans.t;
    const where = engine ? ` on ${engine}` : "";
    const under = version === null ? "" : `, version ${version}`;
    return `${id}: ${phase}${where} for ${seconds(Math.max(0, this.now() - began))}${under}; ${plural(turns, "turn")} done, ${plural(moves, "move")}`;
  }
}
