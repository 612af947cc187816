// The newest plan of each version with its reasons, and the receipts of engines that were emptied.

import { byId, el, keyed, setText } from "./dom.js";
import { clock, plural, seconds } from "./format.js";

const REASONS_MAX = 30;

export class Repack {
  constructor() {
    this.tables = ["gateway", "receipts"];
    this.none = el("p", { class: "muted" });
    const list = el("div");
    byId("plans").append(this.none, list);
    this.plans = keyed(list, planItem);
    this.receipts = keyed(byId("receipts"), receiptRow);
  }

  render(tables) {
    const mode = tables.field("mode");
    const plans = tables.field("repack").plans;
    const idle = mode === "repack" ? "No plan now: no version behind the newest is on more than one engine." : `Mode ${mode}: nothing is repacked by itself.`;
    setText(this.none, plans.length ? "" : idle);
    this.plans(plans, (plan) => plan.version);
    const receipts = [...tables.rows("receipts").values()].sort((a, b) => b.number - a.number);
    this.receipts(receipts, (receipt) => receipt.number);
  }
}

function planItem() {
  const head = el("summary");
  const reasons = el("ul", { class: "list" });
  const rows = keyed(reasons, (text) => ({ node: el("li", {}, text), update() {} }));
  return {
    node: el("details", { class: "plan" }, head, reasons),
    update({ version, moves, freed, reasons: why }) {
      const frees = freed.length ? `frees ${freed.length > 4 ? plural(freed.length, "engine") : freed.join(", ")} by ${plural(moves, "move")}` : "frees no engine";
      setText(head, `Version ${version}: ${frees}`);
      const more = why.length - REASONS_MAX;
      rows(more > 0 ? [...why.slice(0, REASONS_MAX), `and ${more} more`] : why, (text) => text);
    },
  };
}

const pair = ({ estimated, measured }) => `${seconds(estimated)} / ${measured === null ? "…" : seconds(measured)}`;

function receiptRow() {
  const engine = el("th", { scope: "row" });
  const [version, moves, price, gain, when] = [el("td", { class: "num" }), el("td", { class: "num" }), el("td", { class: "num" }), el("td", { class: "num" }), el("td")];
  const node = el("tr", {}, engine, version, moves, price, gain, when);
  return {
    node,
    update(receipt) {
      setText(engine, receipt.engine);
      node.title = receipt.reason;
      setText(version, receipt.version);
      const moved = receipt.outcomes.moved ?? 0;
      setText(moves, moved === receipt.num_moves ? moved : `${moved} of ${receipt.num_moves}`);
      setText(price, pair(receipt.price_s));
      setText(gain, pair(receipt.gain_s));
      const emptied = receipt.emptied_after_s === null ? "not empty yet" : `empty after ${seconds(receipt.emptied_after_s)}`;
      setText(when, `${clock(receipt.planned_unix_s)}, ${emptied}`);
    },
  };
}
