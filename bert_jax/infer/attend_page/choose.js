"use strict";
// The data of the page, the user's choices, and the panel in which the user chooses.

const data = JSON.parse(document.getElementById("data").textContent);
const { layers, heads, windows, tokens, words, special, fills } = data;
const secondStart = data.second_start;
const count = tokens.length;
const bytes = Uint8Array.from(atob(data.weights), (letter) => letter.charCodeAt(0));
// A byte is 255 times the square root of a weight, so that small weights stay precise.
const WEIGHT_OF = Float64Array.from({ length: 256 }, (_, byte) => (byte / 255) ** 2);

const chosen = { layer: 0, heads: [0], hideSpecial: false, stretch: false, mapOf: "mean" };
const at = (id) => document.getElementById(id);
const leftOut = (token) => chosen.hideSpecial && special[token];

function byteOf(layer, head, from, to) {
  return bytes[((layer * heads + head) * count + from) * count + to];
}

/** Returns the attention weight of a head from the token `from` to the token `to`. */
function weight(layer, head, from, to) {
  return WEIGHT_OF[byteOf(layer, head, from, to)];
}

/** Tells whether `to` is outside the window of `from` in a local layer, so the weight must be 0. */
function outside(layer, from, to) {
  return windows[layer] !== null && Math.abs(from - to) > windows[layer];
}

/** Returns the mean weight of some heads of the chosen layer; 0 if a token is left out. */
function meanWeight(ofHeads, from, to) {
  if (leftOut(from) || leftOut(to)) return 0;
  let sum = 0;
  for (const head of ofHeads) sum += weight(chosen.layer, head, from, to);
  return sum / ofHeads.length;
}

/** Formats a weight as a percentage with no more digits than the stored bytes justify. */
function percent(share) {
  const value = 100 * share;
  return `${value >= 9.95 ? value.toFixed(0) : value.toFixed(1)}\u00a0%`;
}

/** Creates an element with a class and children. Text is inserted as text, never as HTML. */
function make(tag, className = "", ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

/** Creates an element for a token. A bdi element has its own writing direction. */
const tokenText = (index) => make("bdi", "", tokens[index]);

// Neighbouring heads get distant hues: steps of about 0.4 of the circle visit every hue once.
const HUE_STEP = (() => {
  const divisor = (a, b) => (b ? divisor(b, a % b) : a);
  let step = Math.max(1, Math.round(heads * 0.4));
  while (divisor(step, heads) > 1) step += 1;
  return step;
})();
const hue = (head) => (255 + (360 * ((head * HUE_STEP) % heads)) / heads) % 360;
const headColour = (head) => `oklch(var(--lightness) var(--chroma) ${hue(head).toFixed(1)})`;

/** Returns red, green and blue of a CSS colour under the current theme. */
function rgb(colour) {
  const probe = make("i");
  probe.style.color = colour;
  document.body.append(probe);
  const context = make("canvas").getContext("2d", { willReadFrequently: true });
  context.fillStyle = getComputedStyle(probe).color;
  probe.remove();
  context.fillRect(0, 0, 1, 1);
  return context.getImageData(0, 0, 1, 1).data;
}

/** Paints each weight as a pixel; its opacity is share / `most`. `hidden` cells are grey. */
function paint(canvas, colour, size, most, share, hidden) {
  canvas.width = canvas.height = size;
  const context = canvas.getContext("2d");
  const image = context.createImageData(size, size);
  for (let cell = 0, place = 0; cell < size * size; cell += 1) {
    const [from, to] = [Math.floor(cell / size), cell % size];
    const grey = hidden(from, to);
    for (let part = 0; part < 3; part += 1) image.data[place++] = grey ? 128 : colour[part];
    image.data[place++] = grey ? 56 : 255 * Math.min(1, share(from, to) / most);
  }
  context.putImageData(image, 0, 0);
}

// In the small maps, a pixel shows the strongest weight of BLOCK x BLOCK tokens.
const BLOCK = Math.ceil(count / 48);

function paintSmallMap(canvas, layer, head, colour) {
  const size = Math.ceil(count / BLOCK);
  const strongest = new Float64Array(size * size);
  let most = 1e-9;
  for (let from = 0; from < count; from += 1) {
    for (let to = 0; to < count; to += 1) {
      const place = Math.floor(from / BLOCK) * size + Math.floor(to / BLOCK);
      const share = weight(layer, head, from, to);
      if (share > strongest[place]) strongest[place] = share;
      if (share > most) most = share;
    }
  }
  // Distance between the nearest tokens of two different blocks.
  const gap = (from, to) => (Math.abs(from - to) - 1) * BLOCK + 1;
  paint(canvas, colour, size, most, (from, to) => strongest[from * size + to],
    (from, to) => from !== to && outside(layer, 0, gap(from, to)));
}

function drawOverview() {
  const colours = Array.from({ length: heads }, (_, head) => rgb(headColour(head)));
  for (const button of at("overview").querySelectorAll("button")) {
    const { layer, head } = button.dataset;
    paintSmallMap(button.firstChild, Number(layer), Number(head), colours[head]);
  }
}

function buildOverview() {
  const grid = at("overview");
  grid.style.gridTemplateColumns = `20px repeat(${heads}, minmax(0, 64px))`;
  grid.append(make("span"));
  for (let head = 0; head < heads; head += 1) grid.append(make("span", "", `${head + 1}`));
  for (let layer = 0; layer < layers; layer += 1) {
    grid.append(make("span", "layer", `${layer + 1}`));
    for (let head = 0; head < heads; head += 1) {
      const button = make("button", "", make("canvas"));
      button.type = "button";
      button.title = `layer ${layer + 1}, head ${head + 1}`;
      button.setAttribute("aria-label", button.title);
      button.style.setProperty("--colour", headColour(head));
      Object.assign(button.dataset, { layer, head });
      grid.append(button);
    }
  }
  grid.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const [layer, head] = [Number(button.dataset.layer), Number(button.dataset.head)];
    const adds = (event.shiftKey || event.ctrlKey || event.metaKey) && layer === chosen.layer;
    chosen.layer = layer;
    if (adds) toggleHead(head);
    else choose({ heads: [head] });
  });
  grid.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -heads, ArrowDown: heads };
    const buttons = [...grid.querySelectorAll("button")];
    const place = buttons.indexOf(event.target) + steps[event.key];
    if (!buttons[place]) return;
    event.preventDefault();
    for (const button of buttons) button.tabIndex = -1;
    buttons[place].tabIndex = 0;
    buttons[place].focus();
  });
}

function buildHeads() {
  for (let head = 0; head < heads; head += 1) {
    const button = make("button", "", `${head + 1}`);
    button.type = "button";
    button.setAttribute("aria-label", `head ${head + 1}`);
    button.style.setProperty("--colour", headColour(head));
    button.addEventListener("click", () => toggleHead(head));
    at("heads").append(button);
  }
}

function toggleHead(head) {
  const rest = chosen.heads.filter((other) => other !== head);
  const added = rest.length === chosen.heads.length;
  // The last chosen head cannot be removed.
  if (added) choose({ heads: [...rest, head].sort((a, b) => a - b) });
  else choose({ heads: rest.length ? rest : [head] });
}

/** Changes the choices and updates the page. */
function choose(changes) {
  Object.assign(chosen, changes);
  if (!chosen.heads.includes(Number(chosen.mapOf))) chosen.mapOf = "mean";
  at("layer").value = chosen.layer + 1;
  const kind = windows[chosen.layer] === null ? "" : ", local";
  at("layer-number").textContent = `${chosen.layer + 1} of ${layers}${kind}`;
  at("all-heads").textContent = chosen.heads.length === heads ? "Only the first" : "All";
  [...at("heads").children].forEach((button, head) => {
    button.setAttribute("aria-pressed", chosen.heads.includes(head));
  });
  for (const button of at("overview").querySelectorAll("button")) {
    const [layer, head] = [Number(button.dataset.layer), Number(button.dataset.head)];
    const pressed = layer === chosen.layer && chosen.heads.includes(head);
    button.setAttribute("aria-pressed", pressed);
    button.tabIndex = layer === chosen.layer && head === chosen.heads[0] ? 0 : -1;
  }
  at("overview").querySelectorAll(".layer").forEach((label, layer) => {
    label.classList.toggle("current", layer === chosen.layer);
  });
  drawLines();
  drawMap();
}

/** Finds the head to show first: its words attend most strongly to words that are not adjacent. */
function mostTelling() {
  let best = { score: -1, layer: 0, head: 0 };
  for (let layer = 0; layer < layers; layer += 1) {
    for (let head = 0; head < heads; head += 1) {
      let score = 0;
      for (let from = 0; from < count; from += 1) {
        let most = 0;
        for (let to = 0; to < count; to += 1) {
          const other = Math.abs(from - to) > 1 && !special[from] && !special[to];
          if (other) most = Math.max(most, weight(layer, head, from, to));
        }
        score += most;
      }
      if (score > best.score) best = { score, layer, head };
    }
  }
  return { layer: best.layer, heads: [best.head] };
}
