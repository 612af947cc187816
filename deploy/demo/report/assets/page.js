"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const PALETTE = ["#6a9bf4", "#f2a33a", "#58c292", "#a981e0", "#dcc136", "#4fbcd6", "#e58ab9", "#93ad5d", "#7f90b8",
  "#cf9468", "#45b3a0", "#bfaef2"];
const colour = (version) => version < 1 ? "#9aa4b0" : PALETTE[(version - 1) % PALETTE.length];
const seconds = (t) => `${t.toFixed(1)} s`;

function node(parent, tag, attributes = {}, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  parent.appendChild(made);
  return made;
}
function drawing(holder, width, height) {
  holder.replaceChildren();
  return node(holder, "svg", { viewBox: `0 0 ${width} ${height}` });
}
function element(parent, tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  parent.appendChild(made);
  return made;
}
function ticks(low, high, about) {
  const raw = (high - low) / about || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const made = [];
  for (let t = Math.ceil(low / step - 1e-9) * step; t <= high + 1e-9; t += step) made.push(Math.round(t * 1e6) / 1e6);
  return made;
}
function tip(target, text) {
  target.addEventListener("mousemove", (event) => {
    const box = $("tip");
    box.textContent = typeof text === "function" ? text() : text;
    box.hidden = false;
    const left = Math.min(event.clientX + 14, innerWidth - box.offsetWidth - 8);
    const top = event.clientY + 16 + box.offsetHeight > innerHeight ? event.clientY - box.offsetHeight - 10 : event.clientY + 16;
    box.style.left = `${Math.max(4, left)}px`;
    box.style.top = `${top}px`;
  });
  target.addEventListener("mouseleave", () => { $("tip").hidden = true; });
}

/* ---- head ---- */
function head() {
  const { run, summary } = data;
  $("title").textContent = run.title;
  document.title = run.title;
  const verdict = $("verdict");
  element(verdict, "span", run.verdict, run.ok ? "ok" : "bad");
  const facts = [`seed ${run.seed}`, `set-up ${seconds(run.setup_s)}`, `run ${seconds(run.wall_s)}`,
    new Date(run.started_unix_s * 1000).toISOString().replace("T", " ").slice(0, 16) + " UTC",
    ...Object.entries(run.facts).map(([name, value]) => `${name} ${value}`)];
  verdict.append(" · " + facts.join(" · "));
  const tiles = [
    [`${summary.reward_first_third.toFixed(2)} → ${summary.reward_last_third.toFixed(2)}`, "reward, first to last third"],
    [summary.versions_published, "versions published"],
    [`${(summary.publish_stall_s * 1000).toFixed(0)} ms`, "training stall per publish"],
    [`${(summary.broadcast_s * 1000).toFixed(0)} ms`, "until every relay held it"],
    [summary.trajectories, "trajectories"],
    [`${summary.turns_cut} / ${summary.turns_resumed} / ${summary.turns_lost}`, "turns cut / resumed / lost"],
    [`${summary.moves} in ${summary.repacks}`, "moves in repacks"],
    [summary.staleness_max, "largest staleness used"],
    [summary.tokens_per_s.toFixed(0), "tokens per second"],
  ];
  for (const [value, label] of tiles) {
    const tile = element($("tiles"), "div", undefined, "tile");
    element(tile, "b", value);
    element(tile, "span", label);
  }
}

/* ---- timeline ---- */
const LANE = 12, GAP = 26, TOP = 58, LEFT = 92, RIGHT = 14;
const view = { from: 0, to: data.duration_s };

function legend() {
  const box = $("legend");
  const entry = (style, text) => {
    const item = element(box, "span");
    element(item, "i").setAttribute("style", style);
    item.append(text);
  };
  for (const version of [...new Set(data.bars.map((bar) => bar.version))].sort((a, b) => a - b))
    entry(`background:${colour(version)}`, `v${version}`);
  entry("background:repeating-linear-gradient(45deg,var(--shade) 0 3px,transparent 3px 6px);border:1px solid var(--shade)", "refresh: loading a version");
  entry("background:repeating-linear-gradient(45deg,var(--alarm) 0 2px,transparent 2px 6px);border:1px solid var(--alarm)", "killed");
  entry("height:0;border-top:2px solid var(--ink)", "a turn moved");
  entry("height:0;border-top:2px solid var(--alarm)", "a cut turn resumed");
  entry("height:0;border-top:2px dashed var(--accent)", "repack");
}
function patterns(svg) {
  const defs = node(svg, "defs");
  for (const [id, stroke] of [["refresh", "var(--shade)"], ["dead", "var(--alarm)"]]) {
    const pattern = node(defs, "pattern", { id, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
    node(pattern, "line", { x1: 0, y1: 0, x2: 0, y2: 6, stroke, "stroke-width": id === "dead" ? 2.5 : 3.5 });
  }
  for (const [id, fill] of [["tip-move", "var(--ink)"], ["tip-cut", "var(--alarm)"]]) {
    const marker = node(defs, "marker", { id, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto", markerUnits: "userSpaceOnUse" });
    node(marker, "path", { d: "M0,0 L8,4 L0,8 z", fill });
  }
  node(node(defs, "clipPath", { id: "inside" }), "rect", { x: LEFT, y: 0, width: 5000, height: 5000 });
}
function timeline() {
  const width = Math.max(900, $("timeline").clientWidth || 1300);
  const tops = {};
  let height = TOP;
  for (const engine of data.engines) { tops[engine.name] = height; height += engine.lanes * LANE + GAP; }
  const svg = drawing($("timeline"), width, height);
  patterns(svg);
  const x = (t) => LEFT + (t - view.from) / (view.to - view.from) * (width - LEFT - RIGHT);
  const bottom = height - GAP + 4;
  for (const t of ticks(view.from, view.to, width / 110)) {
    node(svg, "line", { class: "grid", x1: x(t), x2: x(t), y1: TOP - 8, y2: bottom });
    node(svg, "text", { x: x(t), y: TOP - 12, "text-anchor": "middle" }, `${t} s`);
  }
  const inside = node(svg, "g", { "clip-path": "url(#inside)" });
  for (const engine of data.engines) {
    const y = tops[engine.name];
    node(svg, "text", { class: "name", x: 0, y: y + 12 }, engine.name);
    node(svg, "text", { x: 0, y: y + 27 }, `${engine.lanes} slots`);
    node(inside, "rect", { class: "band", x: LEFT, y: y - 2, width: width - LEFT - RIGHT, height: engine.lanes * LANE + 3, rx: 3 });
  }
  publishes(inside, x, bottom);
  const place = (bar) => tops[bar.engine] + bar.lane * LANE;
  bars(svg, inside, x, place);
  spans(inside, x, tops);
  jumps(inside, x, place);
  repacks(inside, x, bottom);
  zoom(svg, width, bottom);
}
function publishes(parent, x, bottom) {
  for (const version of data.versions) {
    const t = version.sealed ?? version.copied;
    if (t === null || t === undefined) continue;
    if (t > view.to || (t < view.from && view.from > 0)) continue;
    const at = Math.max(x(t), LEFT + 14);  // version 1 went out during the set-up
    node(parent, "line", { x1: at, x2: at, y1: 20, y2: bottom, stroke: colour(version.version), "stroke-width": 1, opacity: .55 });
    const mark = node(parent, "g");
    node(mark, "rect", { x: at - 13, y: 4, width: 26, height: 16, rx: 8, fill: colour(version.version) });
    node(mark, "text", { x: at, y: 15.5, "text-anchor": "middle", style: "fill:#10151c;font-weight:600;font-size:10px" }, `v${version.version}`);
    tip(mark, `version ${version.version} sealed at ${seconds(t)}` + (version.step === null ? "" : `, after step ${version.step}`));
  }
}
function bars(svg, parent, x, place) {
  data.bars.forEach((bar, index) => {
    const left = x(bar.t0), wide = Math.max(1, x(bar.t1) - left - .6);
    if (bar.t1 < view.from || bar.t0 > view.to) return;
    const rect = node(parent, "rect", { class: "bar", "data-session": bar.session, x: left, y: place(bar), width: wide, height: LANE - 2, rx: 1.5, fill: colour(bar.version) });
    if (bar.end === "cut") node(parent, "rect", { class: "alarm", x: left + wide - 2, y: place(bar), width: 2.5, height: LANE - 2 });
    if (wide > 34) node(parent, "text", { class: "bar-label", "data-session": bar.session, x: left + 3, y: place(bar) + 8 }, `t${bar.turn} · ${bar.tokens}`);
    tip(rect, () => describe(bar, index));
    rect.addEventListener("mouseenter", () => pick(svg, bar.session));
    rect.addEventListener("mouseleave", () => pick(svg, null));
  });
}
function describe(bar) {
  const session = data.sessions[bar.session] ?? {};
  const lines = [
    `${bar.session}${session.environment ? " · " + session.environment : ""}`,
    bar.group ? `group ${bar.group}` : "",
    `turn ${bar.turn} on ${bar.engine}, version ${bar.version}`,
    `${seconds(bar.t0)} to ${seconds(bar.t1)}: ${bar.tokens} tokens`,
    `began: ${bar.cause} · ended: ${bar.end}`,
    session.state ? `trajectory ${session.state}` + (session.reward === null ? "" : `, reward ${session.reward.toFixed(2)}`) : "",
  ];
  return lines.filter(Boolean).join("\n");
}
function pick(svg, session) {
  svg.classList.toggle("picked", session !== null);
  for (const shape of svg.querySelectorAll("[data-session]")) shape.classList.toggle("on", shape.dataset.session === session);
}
function spans(parent, x, tops) {
  const lanes = Object.fromEntries(data.engines.map((engine) => [engine.name, engine.lanes]));
  for (const span of data.spans) {
    const left = x(span.t0), wide = Math.max(2.5, x(span.t1) - left), y = tops[span.engine] - 2, high = lanes[span.engine] * LANE + 3;
    const dead = span.kind === "dead";
    const rect = node(parent, "rect", { x: left, y, width: wide, height: high, fill: `url(#${span.kind})`, stroke: dead ? "var(--alarm)" : "var(--shade)" });
    tip(rect, `${span.engine} ${dead ? span.label : "refresh: " + span.label}`);
    if (dead) node(parent, "text", { class: "alarm", x: left, y: y - 4 }, "✕ killed");
  }
}
function jumps(parent, x, place) {
  for (const [source, target, cause] of data.jumps) {
    const a = data.bars[source], b = data.bars[target];
    const x1 = x(a.t1), y1 = place(a) + LANE / 2 - 1, x2 = x(b.t0), y2 = place(b) + LANE / 2 - 1;
    const bend = Math.max(10, Math.abs(x2 - x1) / 2);
    const path = node(parent, "path", { class: `jump ${cause}`, "data-session": a.session, d: `M${x1},${y1} C${x1 + bend},${y1} ${x2 - bend},${y2} ${x2},${y2}`, "marker-end": `url(#tip-${cause === "cut" ? "cut" : "move"})` });
    tip(path, `${a.session}, turn ${a.turn}: ${cause === "cut" ? "cut on" : "moved from"} ${a.engine}, goes on at ${b.engine} after ${seconds(b.t0 - a.t1)}`);
  }
}
function repacks(parent, x, bottom) {
  for (const plan of data.repacks) {
    const at = x(plan.t);
    const mark = node(parent, "g");
    node(mark, "line", { class: "repack", x1: at, x2: at, y1: 30, y2: bottom });
    node(mark, "text", { class: "repack-label", x: at + 3, y: 33 }, "repack");
    tip(mark, `repack of v${plan.version} at ${seconds(plan.t)}\nfrees ${plan.freed.join(", ")}\n` + plan.moves.map((m) => `${m.session_id}: ${m.source} → ${m.destination}`).join("\n") + `\n${plan.reason}`);
  }
}
function zoom(svg, width, bottom) {
  const time = (event) => {
    const box = svg.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width * width;
    return view.from + (Math.min(width - RIGHT, Math.max(LEFT, at)) - LEFT) / (width - LEFT - RIGHT) * (view.to - view.from);
  };
  let start = null, brush = null;
  svg.onmousedown = (event) => { start = time(event); event.preventDefault(); };
  svg.onmousemove = (event) => {
    if (start === null) return;
    brush ??= node(svg, "rect", { class: "brush", y: TOP - 8, height: bottom - TOP + 8 });
    const scale = (width - LEFT - RIGHT) / (view.to - view.from);
    const [a, b] = [start, time(event)].sort((p, q) => p - q);
    brush.setAttribute("x", LEFT + (a - view.from) * scale);
    brush.setAttribute("width", (b - a) * scale);
  };
  svg.onmouseup = (event) => {
    const [a, b] = [start, time(event)].sort((p, q) => p - q);
    start = null;
    brush?.remove();
    brush = null;
    if (b - a > .2) { view.from = a; view.to = b; timeline(); }
  };
  svg.ondblclick = () => { view.from = 0; view.to = data.duration_s; timeline(); };
}

/* ---- versions' travel ---- */
function travel() {
  const rows = data.versions.filter((version) => version.began !== null);
  const bars = 1 + data.relays.length, row = bars * 8 + 10, top = 30, width = 1300;
  const height = top + rows.length * row + 22, left = 150, middle = 660, second = 740;
  const svg = drawing($("travel"), width, height);
  const relayMax = Math.max(.05, ...rows.flatMap((v) => [v.sealed, ...Object.values(v.held)].map((t) => t - v.began)));
  const engineMax = Math.max(1, ...rows.flatMap((v) => Object.values(v.loaded).map((t) => t - v.began)));
  const xr = (d) => left + Math.max(0, d) / relayMax * (middle - left);
  const xe = (d) => second + Math.max(0, d) / engineMax * (width - 40 - second);
  for (const t of ticks(0, relayMax * 1000, 6)) axis(svg, xr(t / 1000), top, height, `${t} ms`);
  for (const t of ticks(0, engineMax, 7)) axis(svg, xe(t), top, height, `${t} s`);
  rows.forEach((version, index) => travelRow(svg, version, top + index * row, row, xr, xe));
}
function axis(svg, x, top, height, label) {
  node(svg, "line", { class: "grid", x1: x, x2: x, y1: top - 8, y2: height - 20 });
  node(svg, "text", { x, y: top - 12, "text-anchor": "middle" }, label);
}
function travelRow(svg, version, y, high, xr, xe) {
  const fill = colour(version.version), middle = y + (high - 10) / 2;
  const name = `v${version.version}` + (version.step === null ? "" : ` (step ${version.step})`);
  const ms = (t) => `${((t - version.began) * 1000).toFixed(0)} ms`;
  node(svg, "text", { class: "name", x: 0, y: middle + 4 }, name);
  const line = (order, label, until, opacity, text) => {
    const at = y + order * 8, end = xr(until - version.began);
    tip(node(svg, "rect", { x: xr(0), y: at, width: Math.max(1, end - xr(0)), height: 7, rx: 2, fill, opacity }), `${name}: ${text}`);
    node(svg, "text", { x: xr(0) - 5, y: at + 6.5, "text-anchor": "end", style: "font-size:8px" }, label);
  };
  line(0, "trainer", version.copied, 1, `copied, training goes on, after ${ms(version.copied)}`);
  data.relays.forEach((relay, order) => {
    if (version.held[relay] !== undefined) line(order + 1, relay, version.held[relay], .5, `on ${relay} after ${ms(version.held[relay])}`);
  });
  const sealed = xr(version.sealed - version.began);
  tip(node(svg, "line", { x1: sealed, x2: sealed, y1: y - 2, y2: y + high - 10, stroke: "var(--ink)", "stroke-width": 2 }), `${name}: sealed after ${ms(version.sealed)}`);
  data.engines.forEach((engine, order) => {
    const t = version.loaded[engine.name];
    if (t !== undefined) dot(svg, xe(t - version.began), middle, order + 1, fill, `${name}: loaded by ${engine.name} after ${seconds(t - version.began)}`);
  });
  if (!Object.keys(version.loaded).length) node(svg, "text", { x: xe(0) + 4, y: middle + 4 }, "no engine loaded it: each takes the newest when it is free");
}
function dot(svg, x, y, label, fill, text) {
  const mark = node(svg, "g");
  node(mark, "rect", { x: x - 8, y: y - 8, width: 16, height: 16, rx: 3, fill, stroke: "var(--ink)", "stroke-width": .8 });
  node(mark, "text", { x, y: y + 4, "text-anchor": "middle", style: "fill:#10151c;font-weight:600" }, label);
  tip(mark, text);
}

/* ---- curves ---- */
function chart(id, { series, xLabel, yMin = 0, yMax, bands = [], format = (v) => v.toFixed(2), dots = false }) {
  const width = 620, height = 220, left = 42, bottom = 34, top = 12, right = 12;
  const holder = $(id);
  const points = series.flatMap((s) => s.points);
  if (!points.length) { element(holder, "p", "nothing was recorded", "hint"); return; }
  const svg = drawing(holder, width, height);
  const x0 = Math.min(...points.map((p) => p[0])), x1 = Math.max(...points.map((p) => p[0]), x0 + 1e-9);
  const y1 = yMax ?? (Math.max(...points.map((p) => p[1])) * 1.1 || 1);
  const x = (v) => left + (v - x0) / (x1 - x0) * (width - left - right);
  const y = (v) => height - bottom - (v - yMin) / (y1 - yMin) * (height - bottom - top);
  for (const v of ticks(yMin, y1, 4)) {
    node(svg, "line", { class: "grid", x1: left, x2: width - right, y1: y(v), y2: y(v) });
    node(svg, "text", { x: left - 6, y: y(v) + 4, "text-anchor": "end" }, +v.toFixed(3));
  }
  for (const v of ticks(x0, x1, 8)) node(svg, "text", { x: x(v), y: height - bottom + 15, "text-anchor": "middle" }, v);
  node(svg, "text", { x: width - right, y: height - 4, "text-anchor": "end" }, xLabel);
  for (const band of bands) {
    node(svg, "line", { x1: x(band.from), x2: x(band.to), y1: y(band.y), y2: y(band.y), stroke: "var(--soft)", "stroke-width": 1.5, "stroke-dasharray": "5 3" });
    node(svg, "text", { x: x((band.from + band.to) / 2), y: y(band.y) - 5, "text-anchor": "middle" }, band.label);
  }
  series.forEach((one, index) => {
    const path = one.points.map((p, i) => `${i ? "L" : "M"}${x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join("");
    node(svg, "path", { d: path, fill: "none", stroke: one.colour, "stroke-width": dots ? 2 : 1.5, "stroke-linejoin": "round", "stroke-dasharray": one.dash ?? "" });
    if (dots) for (const p of one.points) tip(node(svg, "circle", { cx: x(p[0]), cy: y(p[1]), r: 4, fill: one.colour, stroke: "var(--card)" }), `${one.name}: ${format(p[1])} at ${p[0]}`);
    if (one.name) key(svg, left + 8 + index * 118, one);
  });
}
function key(svg, x, one) {
  node(svg, "line", { x1: x, x2: x + 16, y1: 7, y2: 7, stroke: one.colour, "stroke-width": 3, "stroke-dasharray": one.dash ?? "" });
  node(svg, "text", { x: x + 21, y: 11 }, one.name);
}
function rolling(points, size) {
  return points.map((p, i) => {
    const part = points.slice(Math.max(0, i - size + 1), i + 1);
    return [p[0], part.reduce((sum, q) => sum + q[2], 0) / part.length];
  }).slice(Math.min(7, points.length - 1));
}
function curves() {
  const { steps, summary } = data;
  const lines = ["#6a9bf4", "#f2a33a", "#58c292", "#a981e0"];
  chart("reward-steps", { xLabel: "step", yMax: 1, dots: true, series: [{ name: "reward", colour: lines[0], points: steps.map((s) => [s.step, s.reward_mean]) }] });
  const environments = [...new Set(data.rewards.map((r) => r[1]))].sort();
  const ends = data.rewards.map((r) => r[0]), third = Math.floor(ends.length / 3);
  const bands = third ? [
    { from: ends[0], to: ends[third - 1], y: summary.reward_first_third, label: `first third ${summary.reward_first_third.toFixed(2)}` },
    { from: ends[ends.length - third], to: ends[ends.length - 1], y: summary.reward_last_third, label: `last third ${summary.reward_last_third.toFixed(2)}` }] : [];
  chart("reward-time", { xLabel: "seconds", yMax: 1, bands, series: environments.map((env, i) => ({ name: env || "all", colour: lines[i % 4], points: rolling(data.rewards.filter((r) => r[1] === env), 32) })) });
  chart("staleness-steps", { xLabel: "step", dots: true, yMax: Math.max(1, summary.staleness_max) * 1.25, series: [
    { name: "largest", colour: lines[1], points: steps.map((s) => [s.step, s.staleness_max]) },
    { name: "mean", colour: lines[0], points: steps.map((s) => [s.step, s.staleness_mean]) }] });
  const kinds = Object.entries(data.staleness).filter(([, histogram]) => Object.keys(histogram).length);
  shares("staleness-share", kinds);
  const load = Object.entries(data.load);
  chart("running", { xLabel: "seconds", series: load.map(([name, points], i) => ({ name, colour: lines[i % 4], points: points.map((p) => [p[0], p[1]]) })) });
  chart("kv", { xLabel: "seconds", yMax: 1, series: load.map(([name, points], i) => ({ name, colour: lines[i % 4], points: points.map((p) => [p[0], p[2]]) })) });
}
function shares(id, kinds) {
  if (!kinds.length) { element($(id), "p", "nothing was recorded", "hint"); return; }
  const width = 620, row = 44, svg = drawing($(id), width, kinds.length * row + 30);
  kinds.forEach(([kind, histogram], index) => {
    const total = Object.values(histogram).reduce((a, b) => a + b, 0);
    let x = 90;
    node(svg, "text", { class: "name", x: 0, y: index * row + 28 }, kind);
    for (const [staleness, count] of Object.entries(histogram).sort((a, b) => a[0] - b[0])) {
      const wide = count / total * (width - 100);
      const rect = node(svg, "rect", { x, y: index * row + 10, width: Math.max(1, wide - 1), height: 28, rx: 2, fill: PALETTE[+staleness % PALETTE.length] });
      tip(rect, `${kind}: staleness ${staleness}: ${(count / total * 100).toFixed(1)} % of ${total} tokens`);
      if (wide > 46) node(svg, "text", { x: x + 6, y: index * row + 28, style: "fill:#10151c" }, `${staleness}: ${(count / total * 100).toFixed(0)} %`);
      x += wide;
    }
  });
}

/* ---- tables ---- */
function table(id, columns, rows) {
  const top = element($(id), "tr");
  for (const column of columns) element(top, "th", column.name, column.number ? "number" : "");
  for (const row of rows) {
    const line = element($(id), "tr");
    for (const column of columns) element(line, "td", column.text(row), [column.number ? "number" : "", column.mark?.(row) ?? ""].join(" "));
  }
}
function tables() {
  const number = (name, key, digits = 2) => ({ name, number: true, text: (row) => row[key] === null || row[key] === undefined ? "" : (+row[key]).toFixed(digits) });
  table("summary", [{ name: "key", text: (r) => r[0] }, { name: "value", number: true, text: (r) => r[1] }], Object.entries(data.summary));
  table("steps", [number("step", "step", 0), number("at s", "t", 1), number("version", "version", 0), number("reward", "reward_mean"), number("loss", "loss", 4),
    number("staleness", "staleness_mean"), number("max", "staleness_max", 0), number("tokens", "tokens", 0), number("seconds", "seconds", 1), number("waited s", "wait_s", 1)], data.steps);
  table("processes", [{ name: "process", text: (p) => p.name }, { name: "ended", text: (p) => p.ending }, { name: "status", number: true, text: (p) => p.status, mark: (p) => p.clean ? "" : "bad" }, number("lived s", "lived_s", 1)], data.run.processes);
  table("notes", [number("at s", "t", 1), { name: "what", text: (n) => n.kind, mark: (n) => n.kind === "kill" ? "bad" : "" }, { name: "", text: (n) => n.text }], data.notes);
}

head();
legend();
timeline();
travel();
curves();
tables();
let resized;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(timeline, 150); });
