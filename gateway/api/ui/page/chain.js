// The chain of relays, from the master, with the rate at which the newest version came to each.

import { bar, byId, el, keyed, setText } from "./dom.js";
import { bytes, plural, share } from "./format.js";

export class Chain {
  constructor() {
    this.tables = ["relays"];
    this.about = el("p", {});
    this.list = el("ol", { class: "chain" });
    this.notes = el("ul", { class: "list" });
    byId("chain").append(this.about, this.list, this.notes);
    this.hops = keyed(this.list, hopItem);
    this.rows = keyed(this.notes, noteItem);
  }

  render(tables) {
    const relays = [...tables.rows("relays").entries()];
    const known = relays.filter(([, relay]) => relay.model);
    // Any relay knows the chain; the master knows first.
    const [, best] = known.find(([, relay]) => relay.model.master === relay.relay) ?? known[0] ?? [];
    setText(this.about, this.headline(relays, best));
    this.hops(best === undefined ? [] : hopsOf(best, relays), (hop) => hop.relay);
    this.rows(notesOf(relays), (note) => note);
  }

  headline(relays, best) {
    if (!relays.length) return "No relay: the engines keep the version that they were started with.";
    if (best === undefined) return "No relay knows this model yet: nothing was published.";
    const { master, plan, plan_reason: why, newest_sealed: newest } = best.model;
    return `Master ${master || "none"}; ${newest === null ? "nothing sealed yet" : `newest sealed version ${newest}`}; plan ${plan}${why ? ` (${why})` : ""}.`;
  }
}

/** Hops of the chain in order, each with what its own relay says of itself. */
function hopsOf(best, relays) {
  const own = new Map(relays.map(([, relay]) => [relay.relay, relay]));
  return best.model.hops.map((hop, at) => ({
    ...hop,
    at,
    inChain: best.model.chain.includes(hop.relay),
    master: best.model.master === hop.relay,
    own: own.get(hop.relay),
    transfer: own.get(hop.relay)?.transfers[0],
  }));
}

function notesOf(relays) {
  const errors = relays.filter(([, relay]) => relay.error).map(([address, relay]) => `${address}: ${relay.error}`);
  const cut = relays.flatMap(([, relay]) => (relay.cut_off ?? []).map((name) => `${relay.relay} goes past ${name}, which was silent`));
  const refused = new Set(relays.flatMap(([, relay]) => relay.model?.refused_loads ?? []).map((one) => `engine ${one.engine} refused version ${one.version}: ${one.error}`));
  return [...errors, ...cut, ...refused];
}

function hopItem() {
  const name = el("b");
  const role = el("span", { class: "chip" });
  const rate = el("span", { class: "rate" });
  const held = el("span", { class: "muted" });
  const note = el("span", { class: "error" });
  const pool = bar();
  const node = el("li", { class: "hop" }, el("div", {}, name, " ", role), rate, held, pool.node, note);
  return {
    node,
    update(hop) {
      setText(name, hop.relay);
      setText(role, hop.master ? "master" : hop.alive ? (hop.inChain ? `hop ${hop.at}` : "not in the chain") : "away");
      role.className = `chip ${hop.alive ? (hop.master ? "serving" : "joining") : "dead"}`;
      const moving = hop.transfer && `version ${hop.transfer.version}: ${share(hop.transfer.bytes_done / Math.max(1, hop.transfer.bytes_total))} of ${bytes(hop.transfer.bytes_total)}`;
      const came = hop.rate_bytes_s ? `${bytes(Math.round(hop.rate_bytes_s))}/s from ${hop.upstream}${hop.transport ? ` over ${hop.transport}` : ""}` : "";
      setText(rate, moving ?? came);
      setText(held, hop.versions.length ? `holds ${hop.versions.map((v) => `v${v}`).join(" ")}` : "holds nothing");
      pool.node.hidden = !hop.own?.pool_bytes;
      if (hop.own?.pool_bytes) pool.update(hop.own.used_bytes / hop.own.pool_bytes, `pool ${bytes(hop.own.used_bytes)} of ${bytes(hop.own.pool_bytes)}, ${plural(hop.own.pins.length, "pin")}`);
      setText(note, hop.slow ? `slow: ${hop.slow}` : hop.own?.trouble ?? "");
    },
  };
}

function noteItem(text) {
  return { node: el("li", {}, text), update() {} };
}
