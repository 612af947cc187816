// One session: its state, and its transcript token by token, as the gateway recorded it.

import { byId, el, setText } from "./dom.js";
import { authorization, errorOf } from "./feed.js";
import { byName, count, plural, seconds, share } from "./format.js";

const TOKENS_MAX = 4000; // of one trajectory, drawn at once
const LISTED_MAX = 500; // names offered while one is typed
const DOUBTS = [1, 2, 3]; // from so many nats on a token is underlined
const AGAIN_MS = 1000; // between two requests for a session that goes on

export class Session {
  constructor() {
    this.tables = ["sessions"];
    this.id = null;
    this.turns = -1;
    this.askedAt = 0;
    this.leaf = 0;
    this.tokens = true;
    this.asking = null;
    this.body = byId("session");
    byId("session-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.open(byId("session-id").value.trim());
    });
    byId("session-id").addEventListener("focus", () => this.offer());
    this.say("Choose a session in the timeline, or name one.");
  }

  /** Offers the names of live sessions while one is typed. */
  offer() {
    const names = [...(this.last?.rows("sessions").keys() ?? [])].slice(0, LISTED_MAX).sort(byName);
    byId("session-ids").replaceChildren(...names.map((name) => el("option", { value: name })));
  }

  open(id, focus = false) {
    if (!id) return;
    byId("session-id").value = id;
    Object.assign(this, { id, turns: -1, leaf: 0, shown: TOKENS_MAX });
    this.say(`Reading ${id} …`);
    this.ask();
    if (focus) byId("session-heading").focus();
    byId("session-heading").scrollIntoView({ block: "start", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
  }

  /** Reads the open session again when a turn of it has ended. */
  render(tables) {
    this.last = tables;
    const row = this.id === null ? undefined : tables.rows("sessions").get(this.id);
    if (row !== undefined && row[4] !== this.turns && performance.now() - this.askedAt > AGAIN_MS) this.ask();
  }

  async ask() {
    this.asking?.abort();
    const asking = (this.asking = new AbortController());
    this.askedAt = performance.now();
    this.turns = this.last?.rows("sessions").get(this.id)?.[4] ?? -1;
    const at = `sessions/${encodeURIComponent(this.id)}`;
    const get = (path) => fetch(path, { headers: authorization(), signal: asking.signal, cache: "no-store" });
    try {
      const [state, record] = await Promise.all([get(at), get(`${at}/trajectories?tokens=true`)]);
      if (!record.ok && !state.ok) this.say(await errorOf(state), true);
      else if (!record.ok) this.show(await state.json(), { trajectories: [] });
      else this.show(state.ok ? await state.json() : null, await record.json());
    } catch (error) {
      if (!asking.signal.aborted) this.say(`it could not be read: ${error.message}`, true);
    }
  }

  say(text, isError = false) {
    this.body.replaceChildren(el("p", { class: isError ? "error" : "muted", role: isError ? "alert" : null }, text));
  }

  show(state, { state: phase, trajectories }) {
    this.state = state;
    this.trajectories = trajectories;
    this.leaf = Math.min(this.leaf, Math.max(0, trajectories.length - 1));
    const shown = trajectories[this.leaf];
    const open = this.body.contains(document.activeElement) ? document.activeElement.id : null;
    this.body.replaceChildren(
      facts(this.id, state, phase, shown?.trajectory),
      ...(shown === undefined ? [el("p", { class: "muted" }, "No turn has ended yet.")] : [this.controls(trajectories), this.transcript(shown)]),
    );
    if (open) byId(open)?.focus();
  }

  controls(trajectories) {
    const tokens = el("button", { type: "button", id: "as-tokens", "aria-pressed": String(this.tokens), onclick: () => this.as(true) }, "Tokens");
    const text = el("button", { type: "button", id: "as-text", "aria-pressed": String(!this.tokens), onclick: () => this.as(false) }, "Text");
    const leaves = el("select", { id: "leaf", onchange: (event) => this.choose(Number(event.target.value)) });
    for (const [at] of trajectories.entries()) leaves.append(el("option", { value: at, selected: at === this.leaf }, `${at + 1} of ${trajectories.length}`));
    const branch = trajectories.length > 1 ? el("label", { class: "compact" }, "Trajectory ", leaves) : null;
    return el("div", { class: "tools" }, tokens, text, branch);
  }

  as(tokens) {
    this.tokens = tokens;
    this.show(this.state, { trajectories: this.trajectories });
  }

  choose(leaf) {
    this.leaf = leaf;
    this.show(this.state, { trajectories: this.trajectories });
  }

  transcript({ trajectory, spans, tokens }) {
    const versions = [...new Set(trajectory.versions.filter((version) => version >= 0))].sort((a, b) => a - b);
    const about = el("p", { id: "token-about", class: "status-line", "aria-live": "polite" });
    let left = this.shown;
    const parts = [];
    for (const span of spans) {
      if (left <= 0) break;
      const end = Math.min(span.end, span.start + left);
      left -= end - span.start;
      parts.push(spanOf(span, end, trajectory, this.tokens ? tokens : null, versions));
    }
    const box = el("div", { class: "transcript", tabindex: "0", role: "region", "aria-label": "Transcript" }, ...parts);
    if (this.tokens) walkable(box, about, trajectory);
    const rest = trajectory.token_ids.length - this.shown;
    const more = rest > 0 ? el("button", { type: "button", onclick: () => this.more() }, `Show ${count(Math.min(rest, TOKENS_MAX))} of ${count(rest)} tokens more`) : null;
    return el("div", {}, tokenLegend(versions), box, more, about);
  }

  more() {
    this.shown += TOKENS_MAX;
    this.show(this.state, { trajectories: this.trajectories });
  }
}

function facts(id, state, phase, trajectory) {
  const rows = [["state", state?.state ?? phase]];
  if (state?.result) rows.push(["reward", state.result.reward ?? trajectory?.reward]);
  if (trajectory && !state?.turns) rows.push(["turns", trajectory.turns], ["tokens", count(trajectory.token_ids.length)]);
  if (state?.turns !== undefined) {
    rows.push(["engine", state.engine ?? "none yet"], ["version", state.version ?? "none yet"], ["turns", `${count(state.turns)}, ${count(state.running)} running`]);
    rows.push(["tokens of the newest path", count(state.tokens)], ["sampled in all turns", count(state.sampled_tokens)], ["moves", count(state.moves)], ["group", `${state.group_id}, sample ${state.sample_index}`]);
    if (state.parent_session_id) rows.push(["parent", state.parent_session_id]);
    if (state.children.length) rows.push(["waits for children", state.children.join(", ")]);
    if (state.last_dropped) rows.push(["last dropped", state.last_dropped]);
  }
  return el("dl", { class: "facts", "aria-label": `Session ${id}` }, ...rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, String(value)))));
}

const shade = (versions, version) => `v${versions.indexOf(version) % 6}`;

function tokenLegend(versions) {
  const swatch = (kind, text) => el("li", {}, el("span", { class: `swatch ${kind}`, "aria-hidden": "true" }), text);
  const lines = DOUBTS.map((nats) => el("li", {}, el("span", { class: `doubt${nats}` }, `probability below ${share(Math.exp(-nats))}`)));
  return el("ul", { class: "legend" }, swatch("prompt", "not sampled: prompt, tools"), ...versions.map((version) => swatch(shade(versions, version), `sampled under version ${version}`)), ...lines);
}

/** One turn's part. `tokens`: the text of each, or null for the whole text. */
function spanOf(span, end, trajectory, tokens, versions) {
  const segment = trajectory.segments.find((one) => one.start <= span.start && span.start < one.end) ?? trajectory.segments.find((one) => one.end > span.start);
  const made = segment && span.sampled ? `, ${segment.engine}, ${seconds(Math.max(0, segment.ended_unix_s - segment.started_unix_s))}` : "";
  const title = `Turn ${span.turn + 1}, ${span.sampled ? "sampled" : "given"}: ${plural(span.end - span.start, "token")}${made}`;
  const words = el("p", { class: span.sampled ? "sampled" : "given" });
  if (tokens === null) words.append(end === span.end ? span.text : `${span.text.slice(0, (end - span.start) * 4)} …`);
  else for (let at = span.start; at < end; at += 1) words.append(tokenOf(at, trajectory, tokens[at], span.sampled, versions));
  return el("section", { class: "span" }, el("h3", {}, title), words);
}

function tokenOf(at, trajectory, text, sampled, versions) {
  const version = trajectory.versions[at];
  const doubt = sampled ? Math.min(DOUBTS.at(-1), Math.floor(-trajectory.logprobs[at])) : 0;
  const kind = sampled && version >= 0 ? shade(versions, version) : "prompt";
  return el("span", { class: `token ${kind} doubt${Math.max(0, doubt)}`, "data-at": at }, text.replaceAll("\n", "⏎\n"));
}

/** Says what a token is when it is pointed at, or reached by the arrow keys. */
function walkable(box, about, trajectory) {
  let chosen = null;
  const choose = (token) => {
    chosen?.classList.remove("chosen");
    chosen = token;
    chosen?.classList.add("chosen");
    if (chosen === null) return;
    const at = Number(chosen.dataset.at);
    const version = trajectory.versions[at];
    const sampled = version >= 0 ? `, log probability ${trajectory.logprobs[at].toFixed(3)}, version ${version}${trajectory.loss_mask[at] ? "" : ", not trained on"}` : ", given";
    setText(about, `Token ${count(at)}: id ${trajectory.token_ids[at]}, “${chosen.textContent}”${sampled}`);
  };
  box.addEventListener("pointerover", (event) => event.target.classList.contains("token") && choose(event.target));
  box.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    const all = [...box.querySelectorAll(".token")];
    const next = all[chosen === null ? 0 : all.indexOf(chosen) + by];
    if (next === undefined) return;
    choose(next);
    next.scrollIntoView({ block: "nearest" });
  });
}
