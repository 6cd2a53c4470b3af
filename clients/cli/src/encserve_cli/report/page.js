"use strict";
// Fills in the templates of the page and draws the figures with plotly. Data become text only, never HTML: `plain`
// escapes the names for plotly, which reads tags and entities.
const report = JSON.parse(document.getElementById("report").textContent);
const figureData = new Map(); // the data of the box of each figure

// Writes the values of `data` into `root`. Replaces each template with one copy per item of its list.
function fill(root, data) {
  for (const element of root.querySelectorAll("[data-text]")) {
    const text = data[element.dataset.text];
    if (text == null) element.remove();
    else element.textContent = text;
  }
  for (const element of root.querySelectorAll("[data-class]")) element.className = data[element.dataset.class];
  for (const element of root.querySelectorAll("[data-width]")) element.style.width = data[element.dataset.width];
  for (const box of root.querySelectorAll(".plot")) figureData.set(box, data);
  for (const template of root.querySelectorAll("template")) {
    const items = [data[template.dataset.each] ?? []].flat();
    const copies = items.map((item) => {
      const copy = document.importNode(template.content, true);
      fill(copy, item);
      return copy;
    });
    template.replaceWith(...copies);
  }
}
fill(document.querySelector("main"), report);

// The colours are variables of page.css, which has a light and a dark theme.
const style = getComputedStyle(document.documentElement);
const colour = (name) => style.getPropertyValue(`--${name}`).trim();
const colours = (name) => colour(name).split(/\s*,\s*/);
const FONT = colour("sans");

// A colour scale of plotly. Power 2 lets the colours follow the square root of the values.
function scale(name, power = 1) {
  const stops = colours(name);
  return stops.map((stop, place) => [(place / (stops.length - 1)) ** power, stop]);
}

// Returns one matrix of a stack, as rows of numbers. The stack is uint16 in base64: n means `low + n * step`.
function matrix(stack, index) {
  if (!stack.values) {
    const text = atob(stack.data);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    stack.values = new Uint16Array(bytes.buffer);
  }
  return Array.from({ length: stack.rows }, (_, row) => {
    const start = (index * stack.rows + row) * stack.columns;
    const values = stack.values.subarray(start, start + stack.columns);
    return Float32Array.from(values, (value) => stack.low + stack.step * value);
  });
}

const fixed = (value, digits) => value?.toFixed(digits) ?? "NaN"; // JSON has null for NaN

// Escapes a text, so that plotly draws it unchanged. The isolates stop a right-to-left name from reordering other text.
const plain = (text) => `\u2068${String(text).replace(/[&<>]/g, (it) => `&#${it.charCodeAt(0)};`)}\u2069`;

function clip(text, most) {
  const letters = [...text];
  return letters.length <= most ? text : `${letters.slice(0, most - 1).join("")}…`;
}
const clipForAxis = (name) => clip(name, 14);
const clipForTip = (name) => clip(name, 60);
document.title = clipForTip(report.heading);

// Returns the ticks of an axis: as many names as fit into `room` pixels, with `each` pixels per name.
function ticks(names, room, each, positions = [...names.keys()]) {
  const step = Math.max(Math.ceil((each * names.length) / Math.max(room, 1)), 1);
  const shown = [...names.keys()].filter((place) => place % step === 0);
  return {
    tickmode: "array",
    tickvals: shown.map((place) => positions[place]),
    ticktext: shown.map((place) => plain(names[place])),
  };
}
const DOWN = { autorange: "reversed" };

function heatmap(z, colorscale, zmin, zmax) {
  return { type: "heatmap", z, colorscale, zmin, zmax, showscale: false };
}

const names = (report.tokens ?? []).map(({ name }) => name);
const axisNames = names.map(clipForAxis);
const tipNames = names.map(clipForTip);
const ruler = document.createElement("canvas").getContext("2d");
ruler.font = `12px ${FONT}`;
const nameRoom = Math.ceil(Math.max(...axisNames.map((name) => ruler.measureText(name).width))) + 12; // pixels
const selected = { layer: 0, head: 0 };

// A square map of every two tokens. If there is no room for the tokens' names, the map has no axes.
function tokenMap(trace, fit, width, verb, where) {
  const titleRoom = fit === "full" ? 22 : 0;
  const edge = 9; // at the top and the right, or plotly hides the first and the last name
  const left = nameRoom + titleRoom;
  const side = Math.min(width - left - edge, names.length * 160);
  const cell = side / names.length;
  let layout = {
    height: width, margin: { l: 0, r: 0, t: 0, b: 0 }, xaxis: { visible: false }, yaxis: { ...DOWN, visible: false },
  };
  if (fit === "full" ? side > 0 : fit === "panel" && width >= 215 && cell >= 11) {
    const outside = { ticks: "outside", ticklen: 4, tickcolor: "transparent" }; // a gap between the map and the names
    const axis = { ...outside, ...ticks(axisNames, side, 13) };
    const between = side / axis.tickvals.length;
    const angle = between >= nameRoom + 4 ? 0 : between >= 20 ? -45 : -90;
    const bottom = { 0: 26, "-45": 0.75 * nameRoom + 11, "-90": nameRoom + 4 }[angle] + titleRoom;
    const title = (text) => (titleRoom ? { text, standoff: 6 } : undefined);
    layout = {
      width: left + side + edge, height: edge + side + bottom, margin: { l: left, r: edge, t: edge, b: bottom },
      xaxis: { ...axis, tickangle: angle, title: title("token attended to") },
      yaxis: { ...axis, ...DOWN, title: title("attending token") },
    };
    if (cell >= 36) Object.assign(trace, { texttemplate: "%{z:.2f}", textfont: { size: cell >= 48 ? 12 : 10.5 } });
  }
  const hover = ({ x, y, z }) => ({
    from: tipNames[y], fromPlace: y, verb, to: tipNames[x], toPlace: x, value: fixed(z, 3), where,
  });
  return { data: [trace], layout, hover };
}

// Each function returns a figure: `data` and `layout` for plotly, and `hover`, which returns the texts of the tip.
const FIGURES = {
  attention({ head = selected.head }, width, fit) {
    const { layers, entropy, matrices } = report.attention;
    const weights = matrix(matrices, selected.layer * entropy[0].length + head);
    const where = `layer ${layers[selected.layer].name}, head ${head}`;
    return tokenMap(heatmap(weights, scale("blues", 2), 0, 1), fit, width, "attends to", where);
  },

  similarity({ index, stage }, width, fit) {
    const cosines = matrix(report.similarity.matrices, index);
    return tokenMap(heatmap(cosines, scale("diverging"), -1, 1), fit, width, "and", stage);
  },

  entropy(_, width) {
    const { layers, entropy, max_bits } = report.attention;
    const height = layers.length * Math.min(22, Math.max(14, 170 / layers.length));
    const { head, layer } = selected;
    const frame = { x0: head - 0.5, x1: head + 0.5, y0: layer - 0.5, y1: layer + 0.5 };
    const layerNames = layers.map(({ name }) => name);
    const layout = {
      height: height + 50, margin: { l: 46, r: 4, t: 6, b: 44 },
      xaxis: { title: { text: "head" }, ...ticks([...entropy[0].keys()], width - 50, 20) },
      yaxis: { title: { text: "layer" }, ...DOWN, ...ticks(layerNames, height, 14) },
      shapes: [{ type: "rect", ...frame, line: { color: colour("chosen"), width: 2.5 } }],
    };
    const hover = ({ x, y, z }) => ({
      from: `layer ${layerNames[y]}, head ${x}`, value: `${fixed(z, 2)} bits`, where: "mean entropy",
    });
    return { data: [heatmap(entropy, scale("blues"), 0, max_bits)], layout, hover, click: ({ x, y }) => select(y, x) };
  },

  // A line for each token, and a line for the mean. Many tokens share one colour and one entry of the legend.
  norms({ depths, stages, norms, means, log }, width) {
    const lineColours = colours("lines");
    const areFew = names.length <= lineColours.length;
    const data = names.map((_, place) => ({
      x: depths, y: norms.map((row) => row[place]), opacity: areFew ? 1 : 0.55,
      name: areFew ? plain(axisNames[place]) : "each token", showlegend: areFew || place === 0,
      marker: { color: areFew ? lineColours[place] : colour("accent"), size: 5 }, line: { width: 1.5 },
    }));
    const line = { width: 3, dash: "dot" };
    data.push({ x: depths, y: means, name: "mean", marker: { color: colour("strong"), size: 7 }, line });
    for (const trace of data) trace.mode = "lines+markers";
    const layerNames = depths.map((depth) => (depth ? depth - 1 : "input"));
    const layout = {
      height: 400, margin: { l: 56, r: 12, t: 8, b: 48 },
      xaxis: { title: { text: "after layer" }, showgrid: true, tickangle: 0, ...ticks(layerNames, width, 46, depths) },
      yaxis: { title: { text: "norm" }, showgrid: true, rangemode: "tozero" },
      legend: { orientation: "h", yanchor: "bottom", y: 1.02, x: 0 },
    };
    if (log) Object.assign(layout.yaxis, { title: { text: "norm, on a log scale" }, type: "log" });
    if (width < 520 && areFew) {
      layout.height += 10 * data.length;
      Object.assign(layout.legend, { entrywidthmode: "fraction", entrywidth: 0.46 });
    }
    const hover = ({ x, y, curveNumber: place }) => ({
      ...(place < names.length ? { from: tipNames[place], fromPlace: place } : { from: "mean of all tokens" }),
      value: fixed(y, 2), where: `norm, ${stages[depths.indexOf(x)]}`,
    });
    return { data, layout, hover };
  },

  positions({ matrices, limit }) {
    const zsmooth = matrices.rows * matrices.columns > 20_000 && "fast"; // one image instead of a shape per value
    const layout = {
      height: 400, margin: { l: 56, r: 8, t: 8, b: 48 },
      xaxis: { title: { text: "position" } },
      yaxis: { title: { text: "dimension" }, ...DOWN },
    };
    const hover = ({ x, y, z }) => ({ from: `position ${x}, dimension ${y}`, value: fixed(z, 3) });
    return { data: [{ ...heatmap(matrix(matrices, 0), scale("diverging"), -limit, limit), zsmooth }], layout, hover };
  },

  // Shows the dot products of query and document vectors, the largest product of each row, and its part of the score.
  match({ rows, columns, products, best, added, limit }, width) {
    const places = [...rows.keys()];
    const margin = { l: 108, r: 8, t: 8, b: 120 };
    const columnNames = columns.map(({ name }) => clipForAxis(name));
    const data = [
      heatmap(products, scale("diverging"), -limit, limit),
      {
        mode: "markers", x: best, y: places, hoverinfo: "skip",
        marker: { symbol: "square-open", size: 10, line: { width: 2 }, color: colour("strong") },
      },
      {
        type: "bar", orientation: "h", x: added, y: places, xaxis: "x2", marker: { color: colour("accent") },
        text: width < 520 ? [] : places.map((row) => `${fixed(added[row], 3)} ${plain(columnNames[best[row]])}`),
        textposition: "auto", insidetextanchor: "start",
        textfont: { color: colour("strong"), size: 13 }, insidetextfont: { color: colour("surface"), size: 13 },
      },
    ];
    const columnTicks = ticks(columnNames, (width - margin.l - margin.r) * 0.72, 14);
    const layout = {
      height: 24 * rows.length + 136, margin, showlegend: false,
      xaxis: { domain: [0, 0.72], range: [-0.5, columns.length - 0.5], tickangle: -90, ...columnTicks },
      xaxis2: { domain: [0.75, 1], anchor: "y", nticks: 3, showgrid: true, title: { text: "added" } },
      yaxis: { range: [rows.length - 0.5, -0.5], ...ticks(rows.map(clipForAxis), rows.length, 1) },
    };
    const hover = ({ x, y, z }) => {
      const isBar = z === undefined;
      const { place, name } = columns[isBar ? best[y] : x];
      const value = isBar ? `${fixed(added[y], 4)} added` : fixed(z, 4);
      const verb = isBar ? "is most similar to" : "and";
      return { from: clipForTip(rows[y]), fromPlace: y, verb, to: clipForTip(name), toPlace: place, value };
    };
    return { data, layout, hover };
  },
};

// The page has its own tip, because plotly's label ends at the edge of a figure, and some figures are small.
const tip = document.getElementById("tip");
function showTip(texts, { clientX, clientY }) {
  for (const part of tip.querySelectorAll("[data-part]")) part.textContent = texts[part.dataset.part] ?? "";
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const near = (at, size, end) => Math.max(at + 16 + size > end - 8 ? at - 16 - size : at + 16, 8);
  tip.style.left = `${near(clientX, width, window.innerWidth)}px`;
  tip.style.top = `${near(clientY, height, window.innerHeight)}px`;
}

function hideTip() {
  tip.hidden = true;
}

function drawFigure(box) {
  const width = Math.floor(box.clientWidth);
  if (!width) return;
  const { data, layout, hover, click } = FIGURES[box.dataset.figure](figureData.get(box), width, box.dataset.fit);
  box.style.minHeight = `${layout.height}px`;
  const axis = { fixedrange: true, showgrid: false, zeroline: false, ticks: "", gridcolor: colour("line") };
  const font = { family: FONT, size: 12, color: colour("text") };
  const clear = { paper_bgcolor: "transparent", plot_bgcolor: "transparent" };
  const template = { layout: { ...clear, font, hovermode: "closest", dragmode: false, xaxis: axis, yaxis: axis } };
  const traces = data.map((trace) => ({ hoverinfo: "none", ...trace }));
  Plotly.react(box, traces, { width, ...layout, template }, { displayModeBar: false, showTips: false });
  const isNew = !box.tipTexts;
  box.tipTexts = hover;
  if (!isNew) return;
  box.on("plotly_hover", ({ event, points: [point] }) => showTip(box.tipTexts(point), event));
  box.on("plotly_unhover", hideTip);
  if (click) box.on("plotly_click", ({ points: [point] }) => click(point));
}

// Draws figures one after another. The page can react in between. Overlapping calls share the set of waiting boxes.
const waiting = new Set();
async function draw(boxes) {
  delete document.body.dataset.drawn;
  for (const box of boxes) waiting.add(box);
  for (const box of waiting) {
    waiting.delete(box);
    drawFigure(box);
    await new Promise((resolve) => setTimeout(resolve));
  }
  document.body.dataset.drawn = "";
}
const boxes = [...figureData.keys()];
const drawAll = () => draw(boxes);

// Shows one head of a layer. `layer` is an index into the layers of the page.
const layerInputs = document.querySelectorAll('input[name="layer"]');
const headItems = document.querySelectorAll(".head");
function select(layer, head) {
  Object.assign(selected, { layer, head });
  const { layers, entropy } = report.attention;
  layerInputs[layer].checked = true;
  headItems.forEach((item, place) => item.querySelector("button").setAttribute("aria-pressed", place === head));
  document.getElementById("which").textContent = `Layer ${layers[layer].name}, head ${head}`;
  document.getElementById("focus").textContent = `mean entropy ${fixed(entropy[layer][head], 2)} bits`;
  hideTip();
  draw(boxes.filter((box) => box.closest("#attention")));
}
layerInputs.forEach((input, layer) => input.addEventListener("change", () => select(layer, selected.head)));
headItems.forEach((item, head) => item.addEventListener("click", () => select(selected.layer, head)));
if (report.attention) select(0, 0);

window.addEventListener("scroll", hideTip, { passive: true });
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
// The observer calls once at the start, then when the width changes. A phone's address bar changes only the height.
new ResizeObserver(drawAll).observe(document.querySelector("header"));
