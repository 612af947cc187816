// Numbers and times as people read them.

const GROUPED = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const NATURAL = new Intl.Collator("en", { numeric: true });

export const byName = NATURAL.compare;
export const count = (n) => GROUPED.format(n);
export const clock = (unixS) => CLOCK.format(new Date(unixS * 1000));
export const share = (x) => `${Math.round(x * 100)} %`;
export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;

/** 12,345 as 12.3k. */
export function short(n) {
  if (n < 1000) return n < 10 && n % 1 ? n.toFixed(1) : String(Math.round(n));
  const [unit, by] = n < 1e6 ? ["k", 1e3] : n < 1e9 ? ["M", 1e6] : ["G", 1e9];
  const scaled = n / by;
  return `${scaled < 100 ? scaled.toFixed(1) : Math.round(scaled)}${unit}`;
}

export function bytes(n) {
  for (const [unit, by] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (n >= by) return `${n / by < 100 ? (n / by).toFixed(1) : Math.round(n / by)} ${unit}`;
  }
  return `${n} B`;
}

export function seconds(s) {
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 100) return `${Math.round(s)} s`;
  if (s < 7200) return `${Math.round(s / 60)} min`;
  return `${Math.round(s / 3600)} h`;
}
