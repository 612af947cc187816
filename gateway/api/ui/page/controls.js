// What keys, buttons and pointers do to the timeline.

import { byId, setText } from "./dom.js";

const SPANS_S = [30, 120, 300];

export class Controls {
  /** `onOpen(id)`: a session is to be shown whole. */
  constructor(timeline, { onOpen }) {
    this.timeline = timeline;
    this.onOpen = onOpen;
    this.listen();
  }

  listen() {
    const { timeline } = this;
    const act = (id, kind, does) => byId(id).addEventListener(kind, (event) => (does(event), this.show()));
    act("view-fit", "click", () => timeline.setRows(0));
    act("rows-more", "click", () => timeline.step(1));
    act("rows-less", "click", () => timeline.step(-1));
    act("span", "change", (event) => timeline.setSpan(Number(event.target.value)));
    act("pause", "click", () => timeline.togglePause());
    act("timeline", "keydown", (event) => this.key(event));
    act("timeline", "click", (event) => this.click(event));
    const { box, thumb } = timeline;
    box.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    box.addEventListener("pointermove", (event) => this.point(event));
    box.addEventListener("pointerleave", () => timeline.setHover(null));
    thumb.addEventListener("pointerdown", (event) => thumb.setPointerCapture(event.pointerId));
    thumb.addEventListener("pointermove", (event) => thumb.hasPointerCapture(event.pointerId) && timeline.drag(event.movementY));
    thumb.addEventListener("click", (event) => event.stopPropagation());
  }

  /** The state of the buttons. */
  show() {
    const { rows, spanS, pausedAt } = this.timeline;
    byId("view-fit").setAttribute("aria-pressed", String(rows === 0));
    byId("span").value = String(spanS);
    byId("pause").setAttribute("aria-pressed", String(pausedAt !== null));
    setText(byId("pause"), pausedAt === null ? "Pause" : "Resume");
  }

  /** What is chosen or pointed at goes on. */
  render() {
    if (this.timeline.selected !== null || this.timeline.hover !== null) this.timeline.tell();
  }

  wheel(event) {
    if (!event.ctrlKey && event.deltaY && this.timeline.scroll(event.deltaY * this.timeline.dpr)) event.preventDefault();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { timeline } = this;
    const at = SPANS_S.indexOf(timeline.spanS);
    const page = timeline.plotHeight * 0.8;
    const act = {
      ArrowDown: () => timeline.walk(1),
      ArrowUp: () => timeline.walk(-1),
      PageDown: () => timeline.scroll(page),
      PageUp: () => timeline.scroll(-page),
      "+": () => timeline.step(1),
      "=": () => timeline.step(1),
      "-": () => timeline.step(-1),
      "[": () => timeline.setSpan(SPANS_S[Math.max(0, at - 1)]),
      "]": () => timeline.setSpan(SPANS_S[Math.min(SPANS_S.length - 1, at + 1)]),
      " ": () => timeline.togglePause(),
      Enter: () => timeline.selected !== null && this.onOpen(timeline.selected),
      Escape: () => timeline.select(null),
    }[event.key];
    if (act === undefined) return;
    event.preventDefault();
    act();
  }

  point(event) {
    const { band, stay } = this.timeline.at(event);
    this.timeline.setHover(stay ? { id: stay.id } : band ? { band } : null);
  }

  /** Opens a session; of shares, goes to the rows of an engine. */
  click(event) {
    const { timeline } = this;
    const { band, stay } = timeline.at(event);
    if (stay) {
      timeline.select(stay.id);
      this.onOpen(stay.id);
    } else if (band && !timeline.row) timeline.goTo(band);
  }
}
