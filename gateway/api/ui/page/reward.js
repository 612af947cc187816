// The mean reward of finished sessions over time: a curve, and the same as a table.

import { byId, curve, el, keyed, setText } from "./dom.js";
import { clock, count, plural } from "./format.js";

const WIDTH = 1000;
const HEIGHT = 100;
const LAST = 100; // sessions that the headline's mean is of, at least, if so many finished
const shown = (reward) => String(Number(reward.toPrecision(3)));

export class Reward {
  constructor() {
    this.tables = ["rewards"];
    this.about = el("p", {});
    this.curve = curve(WIDTH, HEIGHT, { class: "rewards", role: "img", "aria-labelledby": "reward-about" });
    this.about.id = "reward-about";
    [this.most, this.least, this.from, this.to] = ["most", "least", "from", "to"].map((name) => el("span", { class: `muted ${name}` }));
    this.chart = el("div", { class: "chart" }, this.most, this.least, this.curve.node, this.from, this.to);
    const body = el("tbody");
    this.rows = keyed(body, pointRow);
    const head = el("tr", {}, el("th", { scope: "col" }, "Until"), el("th", { scope: "col", class: "num" }, "Mean reward"), el("th", { scope: "col", class: "num" }, "Sessions"));
    const table = el("table", {}, el("thead", {}, head), body);
    this.details = el("details", { ontoggle: () => this.renderTable() }, el("summary", {}, "As a table"), el("div", { class: "scroll short", tabindex: "0", role: "region", "aria-label": "Mean rewards" }, table));
    byId("reward").append(this.about, this.chart, this.details);
    this.chart.hidden = this.details.hidden = true; // until there are points
    this.points = [];
  }

  render(tables) {
    this.points = settled([...tables.rows("rewards").values()].sort(([a], [b]) => a - b));
    this.chart.hidden = this.details.hidden = !this.points.length;
    setText(this.about, inWords(this.points));
    if (!this.points.length) return;
    const means = this.points.map(([, , mean]) => mean);
    const [least, most] = [Math.min(...means), Math.max(...means)];
    const [from, to] = [this.points[0][0], this.points.at(-1)[0]];
    const x = (t) => (WIDTH * (t - from)) / (to - from || 1);
    const y = (mean) => (most === least ? HEIGHT / 2 : 3 + ((HEIGHT - 6) * (most - mean)) / (most - least));
    const line = this.points.map(([t, , mean]) => [x(t), y(mean)]);
    this.curve.draw(line.length === 1 ? [[0, y(most)], [WIDTH, y(most)]] : line);
    setText(this.most, shown(most));
    setText(this.least, most === least ? "" : shown(least));
    setText(this.from, clock(from));
    setText(this.to, clock(to));
    this.renderTable();
  }

  renderTable() {
    if (this.details.open) this.rows([...this.points].reverse(), ([t]) => t);
  }
}

/** Points as one; like each of them, [t, sessions, mean]. */
function joined(points) {
  const all = points.reduce((total, [, sessions]) => total + sessions, 0);
  return [points.at(-1)[0], all, points.reduce((mean, [, sessions, of]) => mean + of * (sessions / all), 0)];
}

/** The newest point has only begun: until it has half as many sessions as the one before, the two are one. */
function settled(points) {
  const [before, newest] = points.slice(-2);
  return newest !== undefined && newest[1] < before[1] / 2 ? [...points.slice(0, -2), joined([before, newest])] : points;
}

function inWords(points) {
  if (!points.length) return "No session for training has finished since the gateway started.";
  let from = points.length;
  for (let sessions = 0; from > 0 && sessions < LAST; ) sessions += points[--from][1];
  const [, newest, last] = joined(points.slice(from));
  const [firstT, , first] = points[0];
  const before = from > 0 ? `; ${shown(first)} until ${clock(firstT)}. ${count(joined(points)[1])} finished in all` : "";
  return `${shown(last)} on the mean of the last ${plural(newest, "session")}${before}.`;
}

function pointRow() {
  const cells = [el("th", { scope: "row" }), el("td", { class: "num" }), el("td", { class: "num" })];
  return {
    node: el("tr", {}, ...cells),
    update([t, sessions, mean]) {
      [clock(t), shown(mean), count(sessions)].forEach((text, at) => setText(cells[at], text));
    },
  };
}
