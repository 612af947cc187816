// The page: connects to the feed, keeps the tables and the timeline, and draws what changed, a little in each frame.

import { Chain } from "./chain.js";
import { Controls } from "./controls.js";
import { byId, setText } from "./dom.js";
import { Events } from "./events.js";
import { Experience } from "./experience.js";
import { Feed, storeKey } from "./feed.js";
import { Figures } from "./figures.js";
import { Fleet } from "./fleet.js";
import { clock } from "./format.js";
import { Repack } from "./repack.js";
import { Reward } from "./reward.js";
import { Session } from "./session.js";
import { Spans } from "./spans.js";
import { Tables } from "./tables.js";
import { Timeline } from "./timeline.js";
import { Waits } from "./waits.js";

const PANEL_MS = 500; // between two pictures of a panel: faster, nobody reads it
const tables = new Tables();
const spans = new Spans();
const session = new Session();
const timeline = new Timeline(spans);
const controls = new Controls(timeline, { onOpen: (id) => session.open(id, true) });
const panels = [new Figures(spans.counts), new Reward(), new Fleet(), new Waits(), new Chain(), new Repack(), new Experience(), new Events(), session].map((panel) => ({ panel, dirty: false, drawnAt: 0 }));
let lostAt = null; // by the gateway's clock: when the connection ended
let shownUntil = 0;

function onFrame(frame, isSnapshot) {
  const { changes, restarted, events } = tables.apply(frame, isSnapshot);
  if (isSnapshot && lostAt !== null) {
    spans.gap(lostAt, tables.t);
    lostAt = null;
    if (restarted) say(`The gateway was restarted; connected again at ${clock(tables.t)}.`, 20_000);
  }
  spans.apply(tables.t, changes.get("sessions"), changes.get("engines"));
  timeline.changed();
  for (const one of panels) {
    one.dirty ||= one.panel.tables.some((name) => changes.has(name) || (name === "events" && events.length));
  }
  setText(byId("model"), `${tables.field("model")}, mode ${tables.field("mode")}`);
}

function onState({ state, why, retryInS }) {
  const live = state === "live";
  document.body.dataset.feed = state;
  setText(byId("connection"), { live: "live", away: "no connection", key: "needs a key" }[state] ?? state);
  byId("connection").className = `connection ${state}`;
  byId("key-form").hidden = state !== "key";
  byId("forget-key").hidden = !sessionStorage.length || state === "key";
  if (state === "key") {
    setText(byId("key-message"), why);
    byId("key-input").focus();
  }
  if (state === "away") {
    if (lostAt === null && tables.t) lostAt = tables.t;
    say(`No connection to the gateway (${why}): what is shown is of ${tables.t ? clock(tables.t) : "never"}. Trying again in ${retryInS.toFixed(1)} s.`);
  }
  if (live && shownUntil === Infinity) hush();
  timeline.lostAt = lostAt ?? undefined;
  timeline.setLive(live);
}

/** A message above the page, for so long, or until the connection is back. */
function say(text, forMs = Infinity) {
  setText(byId("banner"), text);
  byId("banner").hidden = false;
  byId("banner").classList.toggle("calm", forMs !== Infinity);
  shownUntil = performance.now() + forMs;
}

function hush() {
  byId("banner").hidden = true;
  shownUntil = 0;
}

/** Once for each frame of the display: the timeline, or one panel, whichever has waited. */
function draw(ms) {
  requestAnimationFrame(draw); // first: what a panel throws does not stop the others
  timeline.frame(ms);
  if (shownUntil && ms > shownUntil) hush();
  if (tables.t) {
    const due = panels.filter((one) => one.dirty && ms - one.drawnAt >= PANEL_MS).sort((a, b) => a.drawnAt - b.drawnAt)[0];
    if (due !== undefined) {
      due.dirty = false;
      due.drawnAt = ms;
      due.panel.render(tables);
      controls.render();
    }
  }
}

addEventListener("error", ({ message }) => say(`A part of this page has failed, and may show what is old: ${message}. Reload the page; the gateway itself is not concerned.`));
const feed = new Feed("ui/feed", { onFrame, onState });
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  storeKey(byId("key-input").value.trim());
  byId("key-input").value = "";
  feed.start();
});
byId("forget-key").addEventListener("click", () => {
  storeKey("");
  location.reload();
});
feed.start();
requestAnimationFrame(draw);
