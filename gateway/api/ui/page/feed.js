// The connection to the gateway's feed: server-sent events by fetch, so that a key goes into a header and into no URL.

const RETRY_S = [0.5, 1, 2, 4, 5];
const SILENT_S = 15; // the gateway sends several messages a second: a connection without any is dead
const KEY = "laminar-reader-key";

export const storedKey = () => sessionStorage.getItem(KEY) ?? "";
export const storeKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));
export const authorization = () => (storedKey() ? { Authorization: `Bearer ${storedKey()}` } : {});

/** Splits a stream of text into server-sent events; `onEvent(kind, data)`. */
export class EventParser {
  constructor(onEvent) {
    this.onEvent = onEvent;
    this.rest = "";
  }

  push(text) {
    const parts = (this.rest + text).split("\n\n");
    this.rest = parts.pop();
    for (const part of parts) {
      let kind = "message";
      const data = [];
      for (const line of part.split("\n")) {
        if (line.startsWith("event: ")) kind = line.slice(7);
        else if (line.startsWith("data: ")) data.push(line.slice(6));
      }
      if (data.length) this.onEvent(kind, data.join("\n"));
    }
  }
}

/** What an error response says, in one line. */
export async function errorOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the gateway answered ${response.status}`;
  }
}

/**
 * Connects, and again whenever the connection ends. `onFrame(frame, isSnapshot)`. `onState(state)`: "connecting",
 * "live", "away" with `retryInS` and `why`, or "key" with `why`: then it waits for `start` with another key.
 */
export class Feed {
  constructor(url, { onFrame, onState }) {
    this.url = url;
    this.onFrame = onFrame;
    this.onState = onState;
    this.failures = 0;
    this.stopped = new AbortController();
  }

  start() {
    this.stopped.abort();
    this.stopped = new AbortController();
    this.failures = 0;
    this.run(this.stopped.signal);
  }

  async run(stopped) {
    while (!stopped.aborted) {
      this.onState({ state: this.failures ? "reconnecting" : "connecting" });
      const ended = await this.once(stopped).catch((error) => ({ why: error.message }));
      if (stopped.aborted) return;
      if (ended.needsKey) {
        this.onState({ state: "key", why: ended.why });
        return;
      }
      const retryInS = RETRY_S[Math.min(this.failures, RETRY_S.length - 1)] * (0.75 + Math.random() / 2);
      this.failures += 1;
      this.onState({ state: "away", why: ended.why, retryInS });
      await new Promise((resolve) => setTimeout(resolve, retryInS * 1000));
    }
  }

  /** One connection, to its end; the reason of it. */
  async once(stopped) {
    const connection = new AbortController();
    const abort = () => connection.abort();
    stopped.addEventListener("abort", abort);
    let silence = setTimeout(abort, SILENT_S * 1000);
    try {
      const response = await fetch(this.url, { headers: authorization(), signal: connection.signal, cache: "no-store" });
      if (response.status === 401 || response.status === 403) {
        return { needsKey: true, why: storedKey() ? await errorOf(response) : "" };
      }
      if (!response.ok) return { why: await errorOf(response) };
      const parser = new EventParser((kind, data) => this.onFrame(JSON.parse(data), kind === "snapshot"));
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let first = true; ; first = false) {
        const { done, value } = await reader.read();
        if (done) return { why: "the gateway ended the connection" };
        if (first) this.onState({ state: "live" });
        this.failures = 0;
        clearTimeout(silence);
        silence = setTimeout(abort, SILENT_S * 1000);
        parser.push(value);
      }
    } catch (error) {
      if (connection.signal.aborted && !stopped.aborted) return { why: `nothing came for ${SILENT_S} s` };
      throw error;
    } finally {
      clearTimeout(silence);
      stopped.removeEventListener("abort", abort);
      connection.abort();
    }
  }
}
