// Paints spans into a buffer of pixels. A frame is painted anew each time: that is a few milliseconds for 5,000 sessions,
// which as many rectangles of a canvas would not be.
//
// `view`: {left, pxPerS, width, top, height} in device pixels, `left` the time at x = 0, `now` that at the right edge.

/** The positions of bands, from the top. Fit: each has the same height. Rows: as many lines as it has slots. */
export function layout(bands, rowPx, heightPx, headPx) {
  const fit = rowPx === 0;
  const each = Math.max(headPx, heightPx / Math.max(1, bands.length));
  let y = 0;
  return bands.map((band, at) => {
    const height = fit ? Math.round((at + 1) * each) - y : Math.max(headPx, band.slots.length * rowPx + Math.max(3, rowPx));
    const placed = { band, y, height };
    y += height;
    return placed;
  });
}

/** Paints what is in view of `placed` bands. `colors`: a 32-bit pixel for each phase; `ground` likewise. */
export function paint(pixels, view, placed, rowPx, colors) {
  pixels.fill(colors.ground);
  for (const one of placed) {
    if (one.y + one.height <= view.top || one.y >= view.top + view.height) continue;
    if (rowPx === 0) paintShares(pixels, view, one, colors);
    else paintRows(pixels, view, one, rowPx, colors);
    line(pixels, view, one.y + one.height - 1 - view.top, colors.line);
  }
}

function line(pixels, view, y, color) {
  if (y >= 0 && y < view.height) pixels.fill(color, y * view.width, (y + 1) * view.width);
}

function x(view, t) {
  return Math.max(0, Math.min(view.width, Math.round((t - view.left) * view.pxPerS)));
}

function paintRows(pixels, view, { band, y }, rowPx, colors) {
  const gap = rowPx >= 3 ? 1 : 0;
  const first = Math.max(0, Math.floor((view.top - y) / rowPx));
  const last = Math.min(band.slots.length - 1, Math.floor((view.top + view.height - y) / rowPx));
  for (let slot = first; slot <= last; slot += 1) {
    const from = Math.max(0, y + slot * rowPx - view.top);
    const to = Math.min(view.height, y + (slot + 1) * rowPx - gap - view.top);
    const stays = band.slots[slot];
    for (let at = stays.length - 1; at >= 0; at -= 1) {
      if (stays[at].end <= view.left) break;
      paintStay(pixels, view, stays[at], from, to, colors.phases);
    }
  }
}

function paintStay(pixels, view, stay, from, to, phases) {
  const { times, codes } = stay;
  let right = x(view, Math.min(stay.end, view.now));
  for (let at = codes.length - 1; at >= 0; at -= 1) {
    const left = x(view, times[at]);
    const until = left === right && right < view.width ? right + 1 : right; // the shortest is seen, too
    for (let row = from; row < to; row += 1) pixels.fill(phases[codes[at]], row * view.width + left, row * view.width + until);
    right = left;
    if (left === 0) return;
  }
}

/** How many sessions are in which phase at each pixel's time, as a stack whose height is the most there were. */
function paintShares(pixels, view, { band, y, height }, colors) {
  const width = view.width;
  const changes = colors.phases.map(() => new Int32Array(width + 1));
  for (const stays of band.slots) {
    for (let at = stays.length - 1; at >= 0; at -= 1) {
      if (stays[at].end <= view.left) break;
      countStay(changes, view, stays[at]);
    }
  }
  const most = Math.max(1, band.slots.length);
  const room = height - 2;
  const counts = new Int32Array(changes.length);
  for (let column = 0; column < width; column += 1) {
    let sum = 0;
    let bottom = room;
    for (let phase = 0; phase < counts.length; phase += 1) {
      counts[phase] += changes[phase][column];
      if (counts[phase] === 0) continue;
      sum += counts[phase];
      const top = room - Math.round((sum / most) * room);
      for (let row = Math.max(0, y + top - view.top); row < Math.min(view.height, y + bottom - view.top); row += 1) {
        pixels[row * width + column] = colors.phases[phase];
      }
      bottom = top;
    }
  }
}

function countStay(changes, view, stay) {
  let right = x(view, Math.min(stay.end, view.now));
  for (let at = stay.codes.length - 1; at >= 0; at -= 1) {
    const left = x(view, stay.times[at]);
    if (left < right) {
      changes[stay.codes[at]][left] += 1;
      changes[stay.codes[at]][right] -= 1;
    }
    right = left;
    if (left === 0) return;
  }
}

/** The stay at a point of the view; null where there is none. */
export function stayAt(view, placed, rowPx, px, py) {
  const at = view.top + py;
  const one = placed.find(({ y, height }) => at >= y && at < y + height);
  if (one === undefined || rowPx === 0) return { band: one?.band ?? null, stay: null };
  const stays = one.band.slots[Math.floor((at - one.y) / rowPx)] ?? [];
  const t = view.left + px / view.pxPerS;
  return { band: one.band, stay: stays.find((stay) => stay.start <= t && t < stay.end) ?? null };
}
