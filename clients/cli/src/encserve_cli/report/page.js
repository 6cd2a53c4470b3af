"use strict";
// Draws the figures of the page. Nothing here puts a string into the document as HTML: `report.names` are made safe for
// plotly, which reads markup, and all other text goes in as text.
const report = JSON.parse(document.getElementById("report").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const CONFIG = { displayModeBar: false, responsive: false, showTips: false };
const GAP = { ticks: "outside", ticklen: 4, tickcolor: "rgba(0,0,0,0)" }; // between a map and the names
const LARGEST_CELL = 160; // pixels
const EDGE = 9; // pixels at the top and the right of a map; less would hide the first and the last name
const ruler = document.createElement("canvas").getContext("2d");
const unpacked = new Map();
const chosen = { layer: 0, head: 0 };

function theme() {
  return dark.matches ? report.themes.dark : report.themes.light;
}

// One matrix of a stack: rows of numbers, from the uint16 that stand for them.
function matrix(name, index) {
  const stack = report.stacks[name];
  if (!unpacked.has(name)) {
    const text = atob(stack.data);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    unpacked.set(name, new DataView(bytes.buffer));
  }
  const view = unpacked.get(name);
  const size = stack.rows * stack.columns;
  const rows = [];
  for (let row = 0; row < stack.rows; row++) {
    const numbers = new Float32Array(stack.columns);
    const first = index * size + row * stack.columns;
    for (let column = 0; column < stack.columns; column++) {
      numbers[column] = stack.low + stack.step * view.getUint16(2 * (first + column), true);
    }
    rows.push(numbers);
  }
  return rows;
}

// What hovering over a map of tokens says. plotly's own label would be cut off at the edge of a small map.
const tip = document.getElementById("tip");
function showTip(box, { event, points: [{ x, y, z }] }) {
  const isAttention = box.dataset.stack === "attention";
  const texts = {
    from: report.hovers[y], "from-place": y, to: report.hovers[x], "to-place": x,
    verb: isAttention ? "looks at" : "and",
    value: z.toFixed(3),
    where: isAttention ? attentionTitle(box) : box.closest("figure").dataset.stage,
  };
  for (const [name, text] of Object.entries(texts)) tip.querySelector(`[data-part="${name}"]`).textContent = text;
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = event.clientX + 16 + width > window.innerWidth - 8 ? event.clientX - 16 - width : event.clientX + 16;
  const top = event.clientY + 16 + height > window.innerHeight - 8 ? event.clientY - 16 - height : event.clientY + 16;
  tip.style.left = `${Math.max(left, 8)}px`;
  tip.style.top = `${Math.max(top, 8)}px`;
}

function hideTip() {
  tip.hidden = true;
}

function attentionTitle({ dataset: { head } }) {
  return `layer ${report.attention.layers[chosen.layer]}, head ${head ?? chosen.head}`;
}

// Puts a theme's colours in for their names.
function dress(figure) {
  const colours = theme();
  const layout = figure.layout;
  layout.font.color = colours.text;
  layout.hoverlabel = {
    bgcolor: colours.surface, bordercolor: colours.muted, align: "left",
    font: { color: colours.strong, family: layout.font.family, size: 13 },
  };
  for (const axis of [layout.xaxis, layout.xaxis2 ?? {}, layout.yaxis]) {
    axis.gridcolor = colours.grid;
    axis.linecolor = colours.grid;
  }
  for (const trace of figure.data) {
    if (trace.type === "heatmap") trace.colorscale = colours.scales[layout.meta.scale];
    const name = trace.meta && trace.meta.colour;
    if (name === undefined) continue;
    const colour = typeof name === "number" ? colours.tokens[name] : colours[name];
    trace.marker = { ...trace.marker, color: colour };
    if (trace.type === "scatter") trace.line = { ...trace.line, color: colour };
    else trace.textfont = { color: colours.strong, size: 13 };
    trace.insidetextfont = { color: colours.surface, size: 13 };
  }
}

// The pixels of the longest of these names.
function longest(names, size) {
  ruler.font = `${size}px ${report.font}`;
  return Math.max(...names.map((name) => ruler.measureText(name.replace(/&\w+;/g, "<")).width));
}

// Makes a map of tokens square, with as many names beside it as can be read. `fit` is "full", "panel" or "bare".
function layTokens(figure, width, fit) {
  const { layout, data: [trace] } = figure;
  const count = report.names.length;
  const titled = fit === "full";
  const size = titled ? 12 : 11;
  const outer = titled ? 22 : 0; // of the axis's title
  const roomBeside = (label) => Math.min(width - label - outer - EDGE, count * LARGEST_CELL);
  const widest = roomBeside(longest(report.names, size) + 12);
  if (fit === "bare" || widest <= 0 || (!titled && (width < 215 || widest / count < 11))) {
    layout.margin = { l: 0, r: 0, t: 0, b: 0 };
    layout.height = width;
    layout.xaxis.visible = layout.yaxis.visible = false;
    return;
  }
  // Which names there is room for decides how much room they take.
  const step = Math.max(Math.ceil((13 * count) / widest), 1);
  const places = report.names.map((_, place) => place).filter((place) => place % step === 0);
  const names = places.map((place) => report.names[place]);
  const label = Math.ceil(longest(names, size)) + 12;
  const room = roomBeside(label);
  const left = label + outer;
  const cell = room / count;
  const between = cell * step;
  const angle = between >= label + 4 ? 0 : between >= 20 ? -45 : -90;
  const bottom = Math.ceil({ 0: 26, "-45": label * 0.75 + 10, "-90": label + 4 }[angle]) + outer;
  for (const axis of [layout.xaxis, layout.yaxis]) {
    Object.assign(axis, { tickmode: "array", tickvals: places, ticktext: names, tickfont: { size }, ...GAP });
    axis.title = titled ? { ...axis.title, standoff: 6, font: { size: 12 } } : undefined;
  }
  layout.xaxis.tickangle = angle;
  layout.margin = { l: left, r: EDGE, t: EDGE, b: bottom };
  layout.width = left + room + EDGE;
  layout.height = EDGE + room + bottom;
  if (cell >= 36) {
    trace.texttemplate = "%{z:.2f}";
    trace.textfont = { size: cell >= 48 ? 12 : 10.5 };
  }
}

// Names as many places of an axis as there is room for, in pixels.
function thin(axis, room, each) {
  const { tickvals, ticktext } = axis;
  const step = Math.ceil(tickvals.length / Math.max(Math.floor(room / each), 1));
  axis.tickvals = tickvals.filter((_, place) => place % step === 0);
  axis.ticktext = ticktext.filter((_, place) => place % step === 0);
}

// On a phone fewer layers are named, and the legend takes two columns and room of its own.
function layLines({ layout, data }, width) {
  thin(layout.xaxis, width, 46);
  layout.xaxis.tickangle = 0;
  if (width >= 520) return;
  Object.assign(layout.legend, { entrywidthmode: "fraction", entrywidth: 0.46 });
  layout.height += 10 * data.length;
}

function render(box) {
  const { figure: name, stack, index, fit } = box.dataset;
  const figure = structuredClone(report.figures[name]);
  const width = Math.floor(box.clientWidth);
  if (!width) return;
  if (stack) figure.data[0].z = matrix(stack, Number(index));
  if (fit) {
    layTokens(figure, width, fit);
  } else if (name === "entropy") {
    outline(figure);
  } else if (name === "norms") {
    layLines(figure, width);
  } else if (name.startsWith("match")) {
    const { margin: { l, r }, xaxis } = figure.layout;
    thin(xaxis, (width - l - r) * xaxis.domain[1], 14);
    if (width < 520) delete figure.data[2].text; // bars without room for it
  }
  dress(figure);
  figure.layout.width ??= width;
  box.style.minHeight = `${figure.layout.height}px`;
  Plotly.react(box, figure.data, figure.layout, CONFIG);
  if (shown.has(box)) return;
  if (name === "entropy") box.on("plotly_click", ({ points: [point] }) => choose(point.y, point.x));
  if (fit) {
    box.on("plotly_hover", (found) => showTip(box, found));
    box.on("plotly_unhover", hideTip);
  }
}

// A frame around the head that is chosen.
function outline(figure) {
  const [x, y] = [chosen.head, chosen.layer];
  figure.layout.shapes = [{
    type: "rect", x0: x - 0.5, x1: x + 0.5, y0: y - 0.5, y1: y + 0.5, line: { color: theme().tokens[1], width: 2.5 },
  }];
}

const boxes = [...document.querySelectorAll(".plot")];
const waiting = new Set(boxes);
const shown = new Set();

// Draws what waits, a figure at a time so that the page stays alive; what can be seen comes first.
let isDrawing = false;
async function draw() {
  if (isDrawing) return;
  isDrawing = true;
  while (waiting.size) {
    const visible = [...waiting].find((box) => {
      const { top, bottom } = box.getBoundingClientRect();
      return bottom > 0 && top < window.innerHeight;
    });
    const box = visible || waiting.values().next().value;
    waiting.delete(box);
    render(box);
    shown.add(box);
    await new Promise((resolve) => setTimeout(resolve));
  }
  isDrawing = false;
  document.body.dataset.drawn = String(shown.size);
}

function drawAgain(which) {
  delete document.body.dataset.drawn;
  for (const box of which) waiting.add(box);
  draw();
}

// Shows a layer, by its place among those of the page, and one of its heads.
function choose(layer, head) {
  const isNewLayer = layer !== chosen.layer;
  Object.assign(chosen, { layer, head });
  const { layers, heads, entropy } = report.attention;
  const changed = [];
  for (const box of boxes) {
    if (box.dataset.stack === "attention") {
      const own = box.dataset.head === undefined ? head : Number(box.dataset.head);
      box.dataset.index = String(layer * heads + own);
      if (isNewLayer || box.dataset.head === undefined) changed.push(box);
    } else if (box.dataset.figure === "entropy") {
      changed.push(box);
    }
  }
  for (const item of document.querySelectorAll(".head")) {
    const isOwn = Number(item.dataset.head) === head;
    item.classList.toggle("chosen", isOwn);
    item.querySelector("button").setAttribute("aria-pressed", String(isOwn));
  }
  document.querySelector(`input[name="layer"][value="${layer}"]`).checked = true;
  document.getElementById("which").textContent = `Layer ${layers[layer]}, head ${head}`;
  hideTip();
  document.getElementById("focus").textContent = `mean entropy ${entropy[layer][head].toFixed(2)} bits`;
  drawAgain(changed);
}

if (report.attention) {
  for (const input of document.querySelectorAll('input[name="layer"]')) {
    input.addEventListener("change", () => choose(Number(input.value), chosen.head));
  }
  for (const item of document.querySelectorAll(".head")) {
    item.addEventListener("click", () => choose(chosen.layer, Number(item.dataset.head)));
  }
  choose(0, 0);
}
draw();
window.addEventListener("scroll", hideTip, { passive: true });
dark.addEventListener("change", () => drawAgain(boxes));
let timer = 0;
let lastWidth = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth === lastWidth) return; // a phone's address bar changes the height alone
  lastWidth = window.innerWidth;
  clearTimeout(timer);
  timer = setTimeout(() => drawAgain(boxes), 120);
});
