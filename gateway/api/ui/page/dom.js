// Elements made by code. Text is only ever set as text: names come from agents and engines.

/** An element. `props`: attributes; `class`; `on*` listeners; false, null and undefined leave one out. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name === "className" ? "class" : name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

export const byId = (id) => document.getElementById(id);

/** Sets text where it differs: an untouched node costs no layout, and is not read out again. */
export function setText(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

/**
 * Keeps the children of `parent` in step with `items`, each by its key: `make()` gives {node, update(item)}.
 * Nodes stay where they are, so that the focus and a selection do too.
 */
export function keyed(parent, make) {
  const known = new Map();
  return (items, keyOf) => {
    const wanted = new Set();
    let at = parent.firstElementChild;
    for (const item of items) {
      const key = keyOf(item);
      if (wanted.has(key)) continue;
      wanted.add(key);
      let found = known.get(key);
      if (found === undefined) known.set(key, (found = make(item)));
      if (found.node === at) at = at.nextElementSibling;
      else parent.insertBefore(found.node, at);
      found.update(item);
    }
    for (const [key, found] of known) {
      if (wanted.has(key)) continue;
      found.node.remove();
      known.delete(key);
    }
  };
}

/** A line through points, in the coordinates of its box, which is stretched to the room that it gets. */
export function curve(width, height, props) {
  const [chart, line] = ["svg", "polyline"].map((tag) => document.createElementNS("http://www.w3.org/2000/svg", tag));
  for (const [name, value] of Object.entries({ viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", ...props })) chart.setAttribute(name, value);
  chart.append(line);
  return { node: chart, draw: (points) => line.setAttribute("points", points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ")) };
}

/** A horizontal bar from 0 to 1, with its figure beside it as text. */
export function bar() {
  const fill = el("span", { class: "fill" });
  const label = el("span", { class: "bar-label" });
  const node = el("span", { class: "bar-cell" }, el("span", { class: "bar", "aria-hidden": "true" }, fill), label);
  return {
    node,
    update(share, text, kind = "") {
      fill.style.width = `${Math.round(Math.max(0, Math.min(1, share)) * 100)}%`;
      fill.className = `fill ${kind}`;
      setText(label, text);
    },
  };
}
