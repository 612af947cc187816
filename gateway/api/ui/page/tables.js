// The gateway's tables as the feed's frames give them: whole by a snapshot, then what differs.

const EVENTS_MAX = 300;

export class Tables {
  constructor() {
    this.life = "";
    this.t = 0; // the gateway's clock, at the last frame
    this.tables = new Map();
    this.events = []; // the newest last
    this.lastSeq = 0;
  }

  /** A table's rows by key; empty before the first frame. */
  rows(name) {
    return this.tables.get(name) ?? EMPTY;
  }

  /** One field of the status. */
  field(name) {
    return this.rows("gateway").get(name);
  }

  /** Takes a frame. What changed: by table, {set: [[key, row]], gone: [key]}; `restarted`: another life. */
  apply(frame, isSnapshot) {
    const restarted = isSnapshot && this.life !== "" && this.life !== frame.life;
    if (restarted) this.lastSeq = 0;
    this.life = frame.life;
    this.t = frame.t_unix_s;
    const changes = new Map();
    for (const [name, change] of Object.entries(frame.tables)) changes.set(name, this.change(name, change, isSnapshot));
    return { changes, restarted, events: this.take(frame.events) };
  }

  change(name, change, isSnapshot) {
    let rows = this.tables.get(name);
    if (rows === undefined) this.tables.set(name, (rows = new Map()));
    const set = Object.entries(change.set ?? {});
    const gone = isSnapshot ? [...rows.keys()].filter((key) => !Object.hasOwn(change.set ?? {}, key)) : change.gone ?? [];
    for (const [key, row] of set) rows.set(key, row);
    for (const key of gone) rows.delete(key);
    return { set, gone };
  }

  take(events) {
    const fresh = events.filter((event) => event.seq > this.lastSeq);
    if (fresh.length) {
      this.lastSeq = fresh.at(-1).seq;
      this.events.push(...fresh);
      this.events.splice(0, this.events.length - EVENTS_MAX);
    }
    return fresh;
  }
}

const EMPTY = new Map();
