// Who waits for whom: everything that holds something up, and what admission counts.

import { bar, byId, el, keyed, setText } from "./dom.js";
import { byName, count, plural, seconds } from "./format.js";
import { serves } from "./spans.js";

const SHOWN_MAX = 40;

export class Waits {
  constructor() {
    this.tables = ["gateway", "engines", "relays"];
    this.meter = bar();
    this.about = el("p", {});
    byId("admission").append(el("h3", {}, "Admission"), this.meter.node, this.about);
    this.list = keyed(byId("waits"), waitItem);
  }

  render(tables) {
    this.renderAdmission(tables.field("admission"));
    const found = waits(tables);
    const rows = found.slice(0, SHOWN_MAX);
    if (found.length > SHOWN_MAX) rows.push({ kind: "", who: "", text: `and ${found.length - SHOWN_MAX} more` });
    if (!found.length) rows.push({ kind: "ok", who: "", text: "Nothing waits." });
    this.list(rows, (row) => `${row.kind}|${row.who}|${row.key ?? row.text}`);
  }

  renderAdmission({ reader, batch, bound, running, buffered, stranded, full }) {
    if (bound === null) {
      this.meter.node.hidden = true;
      setText(this.about, "No reader has sampled yet: nothing bounds new sessions.");
      return;
    }
    this.meter.node.hidden = false;
    this.meter.update((running + buffered) / Math.max(1, bound), `${count(running + buffered)} of ${count(bound)}`, full ? "bad" : "good");
    const held = stranded ? `; ${plural(stranded, "trajectory", "trajectories")} of groups that lack members are not counted` : "";
    setText(
      this.about,
      `${count(running)} running and ${count(buffered)} buffered trajectories, for reader ${reader || "without a name"}, who takes ${count(batch)} at once${held}. ` +
        (full ? "No new session begins until it takes a batch." : "New sessions are admitted."),
    );
  }
}

/** Rows {kind, who, text, key}: `kind` is a class of the style sheet; what moves stands in `text` but not in `key`. */
export function waits(tables) {
  const engines = [...tables.rows("engines").values()].sort((a, b) => byName(a.name, b.name));
  const status = (name) => tables.field(name);
  const found = [];
  const add = (kind, who, text, key) => found.push({ kind, who, text, key });
  if (status("store_failure")) add("bad", "store", `cannot be written, and no turn begins: ${status("store_failure")}`);
  if (engines.length && !engines.some(serves)) add("bad", "turns", "wait for any engine: none serves");
  for (const [reason, n] of Object.entries(status("sessions").waiting_for)) add("warn", plural(n, "turn"), reason, reason);
  const admission = status("admission");
  if (admission.full) add("warn", "new sessions", `wait: ${admission.running} running and ${admission.buffered} buffered trajectories reach the bound of ${admission.bound}`, "full");
  if (admission.idle) add("info", plural(admission.idle, "session"), "had no request for long, and count no more: gateway sessions --abandon ends them", "idle");
  for (const [reader, note] of Object.entries(admission.notes)) add("warn", `reader ${reader}`, note);
  for (const engine of engines) {
    for (const held of engine.held_by) {
      const idle = held.idle_s === null ? "" : `, idle for ${seconds(held.idle_s)}`;
      add("hold", engine.name, `stays on version ${engine.version} for session ${held.session_id} (${held.on_version_loss})${idle}`, held.session_id);
    }
    if (engine.last_error) add("bad", engine.name, engine.last_error);
  }
  for (const group of admission.waiting_groups) add("info", "reader", `waits for ${group}`);
  for (const address of status("unreachable_relays")) add("bad", "engines", `beside relay ${address} keep the version they hold: it does not answer`);
  for (const [address, why] of Object.entries(status("refused_relays"))) add("bad", `relay ${address}`, `is refused: ${why}`);
  for (const [name, why] of Object.entries(status("engines_elsewhere"))) add("bad", name, why);
  if (status("unclaimed")) add("bad", "claims on engines", `are not renewed: ${status("unclaimed")}`);
  const shared = status("shared_experience");
  if (shared?.failure) add("bad", plural(shared.waiting, "finished trajectory", "finished trajectories"), `wait for ${shared.address}: ${shared.failure}`);
  for (const relay of tables.rows("relays").values()) {
    if (relay.trouble) add("bad", `relay ${relay.relay}`, relay.trouble);
    if (relay.draining) add("info", `relay ${relay.relay}`, "drains: it takes nothing new");
  }
  return found;
}

export function waitItem() {
  const who = el("b");
  const text = el("span");
  const node = el("li", {}, who, " ", text);
  return {
    node,
    update(row) {
      node.className = `wait ${row.kind}`;
      setText(who, row.who);
      setText(text, row.text);
    },
  };
}
