"use strict";
// What the page knows, what is chosen, and the panel that chooses it.

const data = JSON.parse(document.getElementById("data").textContent);
const { layers, heads, windows, tokens, words, special, fills } = data;
const secondStart = data.second_start;
const count = tokens.length;
const bytes = Uint8Array.from(atob(data.weights), (letter) => letter.charCodeAt(0));
// A byte is 255 times the square root of a weight: small weights keep their digits.
const WEIGHT_OF = Float64Array.from({ length: 256 }, (_, byte) => (byte / 255) ** 2);

const chosen = { layer: 0, heads: [0], hideSpecial: false, stretch: false, mapOf: "mean" };
const at = (id) => document.getElementById(id);
const leftOut = (token) => chosen.hideSpecial && special[token];

function byteOf(layer, head, from, to) {
  return bytes[((layer * heads + head) * count + from) * count + to];
}

/** The share of `from`'s attention that a head gives to `to`. */
function weight(layer, head, from, to) {
  return WEIGHT_OF[byteOf(layer, head, from, to)];
}

/** Whether `to` is farther from `from` than a local layer sees: no weight can be there. */
function outside(layer, from, to) {
  return windows[layer] !== null && Math.abs(from - to) > windows[layer];
}

/** The mean of some heads of the chosen layer; 0 where a token is left out. */
function meanWeight(ofHeads, from, to) {
  if (leftOut(from) || leftOut(to)) return 0;
  let sum = 0;
  for (const head of ofHeads) sum += weight(chosen.layer, head, from, to);
  return sum / ofHeads.length;
}

/** As precise as the stored bytes are. */
function percent(share) {
  const value = 100 * share;
  return `${value >= 9.95 ? value.toFixed(0) : value.toFixed(1)}\u00a0%`;
}

/** A tag with a class and children; text is never read as HTML. */
function make(tag, className = "", ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

/** A token, in its own writing direction as everything in a bdi. */
const tokenText = (index) => make("bdi", "", tokens[index]);

// Hues far apart for neighbours: steps of about 0.4 of the circle that meet every hue once.
const HUE_STEP = (() => {
  const divisor = (a, b) => (b ? divisor(b, a % b) : a);
  let step = Math.max(1, Math.round(heads * 0.4));
  while (divisor(step, heads) > 1) step += 1;
  return step;
})();
const hue = (head) => (255 + (360 * ((head * HUE_STEP) % heads)) / heads) % 360;
const headColour = (head) => `oklch(var(--lightness) var(--chroma) ${hue(head).toFixed(1)})`;

/** The red, green and blue of a CSS colour under the theme of now. */
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

/** Paints shares as the opacity of a colour, a pixel each; `most` is opaque, `hidden` cells grey. */
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

// A small map of a long text shows the strongest weight of each block of this many tokens.
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
  // The nearest tokens of two blocks, if they are not one.
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
  // One at least stays chosen.
  if (added) choose({ heads: [...rest, head].sort((a, b) => a - b) });
  else choose({ heads: rest.length ? rest : [head] });
}

/** Changes what is chosen and shows it everywhere. */
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

/** The head whose words look most at one word each that is no neighbour: something to see. */
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
