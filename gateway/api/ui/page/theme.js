// The colours of the style sheet, for what is drawn on canvas. They follow the system's light or dark.

class Theme {
  constructor() {
    this.known = new Map();
    this.listeners = [];
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.known.clear();
      for (const listener of this.listeners) listener();
    });
  }

  onChange(listener) {
    this.listeners.push(listener);
  }

  /** The value of a custom property, such as `--text`. */
  css(name) {
    let found = this.known.get(name);
    if (found === undefined) {
      found = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
      this.known.set(name, found);
    }
    return found;
  }

  /** As 32-bit pixels of an ImageData: {ground, line, phases}. */
  pixels(phases) {
    let found = this.known.get("pixels");
    if (found === undefined) {
      found = { ground: pixel(this.css("--plot")), line: pixel(this.css("--line")), phases: phases.map((phase) => pixel(this.css(`--${phase}`))) };
      this.known.set("pixels", found);
    }
    return found;
  }
}

/** Of a colour #rrggbb, with the bytes in the order of this machine. */
function pixel(hex) {
  const parts = [1, 3, 5].map((at) => Number.parseInt(hex.slice(at, at + 2), 16));
  return new Uint32Array(new Uint8Array([...parts, 255]).buffer)[0];
}

export const theme = new Theme();
