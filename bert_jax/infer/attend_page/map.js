// The panel with the map of all weights: a row for each attending token.

let cursor = null; // [from, to]

const mapHeads = () => (chosen.mapOf === "mean" ? chosen.heads : [Number(chosen.mapOf)]);

function buildMap() {
  for (let token = 0; token < count; token += 1) {
    at("map-rows").append(make("span", "", tokenText(token)));
    at("map-columns").append(make("span", "", tokenText(token)));
  }
  at("map-of").addEventListener("change", (event) => choose({ mapOf: event.target.value }));
  const cells = at("map-cells");
  const follow = (event) => {
    const box = cells.getBoundingClientRect();
    const token = (share) => Math.min(count - 1, Math.max(0, Math.floor(share * count)));
    const from = token((event.clientY - box.top) / box.height);
    point([from, token((event.clientX - box.left) / box.width)]);
  };
  cells.addEventListener("pointermove", follow);
  cells.addEventListener("pointerdown", follow);
  cells.addEventListener("pointerleave", (event) => {
    if (event.pointerType !== "touch") point(null); // a tap ends here too; keep what it selected
  });
  cells.addEventListener("blur", () => point(null));
  cells.addEventListener("focus", () => {
    if (!cursor && cells.matches(":focus-visible")) point([0, 0]);
  });
  cells.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (event.key === "Escape") point(null);
    if (!step[event.key]) return;
    event.preventDefault();
    const [from, to] = cursor ?? [0, 0];
    const inside = (token) => Math.min(count - 1, Math.max(0, token));
    point([inside(from + step[event.key][0]), inside(to + step[event.key][1])]);
    at("map-cursor").scrollIntoView({ block: "nearest", inline: "nearest" });
  });
  new ResizeObserver(fitMap).observe(at("map-panel"));
}

/** Makes the cells as large as the panel allows. The map of a long text scrolls. */
function fitMap() {
  const style = document.documentElement.style;
  const width = at("map-panel").clientWidth - 32;
  style.setProperty("--label", `${count > 24 ? 9 : 12}px`);
  const labels = at("map-rows").offsetWidth;
  const cell = Math.max(11, Math.min(34, Math.floor((width - labels) / count)));
  style.setProperty("--cell", `${cell}px`);
  style.setProperty("--label", `${Math.min(13, cell - 2)}px`);
}

function drawMap() {
  const options = [["mean", chosen.heads.length === 1
    ? `head ${chosen.heads[0] + 1}` : `mean of ${chosen.heads.length} heads`]];
  if (chosen.heads.length > 1) {
    for (const head of chosen.heads) options.push([`${head}`, `head ${head + 1}`]);
  }
  at("map-of").replaceChildren(...options.map(([value, name]) => {
    const option = make("option", "", `layer ${chosen.layer + 1}, ${name}`);
    option.value = value;
    return option;
  }));
  at("map-of").value = chosen.mapOf;
  const ofHeads = mapHeads();
  const colour = ofHeads.length === 1 ? headColour(ofHeads[0]) : "var(--accent)";
  const shares = new Float64Array(count * count);
  let most = 1e-9;
  for (let place = 0; place < shares.length; place += 1) {
    shares[place] = meanWeight(ofHeads, Math.floor(place / count), place % count);
    if (shares[place] > most) most = shares[place];
  }
  paint(at("map-canvas"), rgb(colour), count, most, (from, to) => shares[from * count + to],
    (from, to) => outside(chosen.layer, from, to));
  at("map-scale").style.background = `linear-gradient(to right, transparent, ${colour})`;
  at("map-most").textContent = percent(most);
  point(cursor);
}

function point(cell) {
  cursor = cell;
  const mark = at("map-cursor");
  mark.hidden = cell === null;
  for (const [id, token] of [["map-rows", cell?.[0]], ["map-columns", cell?.[1]]]) {
    at(id).querySelector(".current")?.classList.remove("current");
    if (cell) at(id).children[token].classList.add("current");
  }
  const note = at("map-note");
  if (!cell) {
    const window = windows[chosen.layer];
    const local = window === null ? ""
      : ` This layer is local: a token sees ${window} tokens on each side, and the rest is grey.`;
    note.textContent = "Rows are attending tokens, columns the tokens that they attend to. Point "
      + `at a cell to see its weight.${local}`;
    return;
  }
  const [from, to] = cell;
  let share = percent(meanWeight(mapHeads(), from, to));
  if (outside(chosen.layer, from, to)) share = "outside the window";
  if (leftOut(from) || leftOut(to)) share = "left out";
  mark.style.left = `calc(var(--cell) * ${to})`;
  mark.style.top = `calc(var(--cell) * ${from})`;
  mark.classList.toggle("low", from < 2);
  mark.classList.toggle("right", to > 1 && to > count - 3);
  mark.firstChild.textContent = share;
  note.replaceChildren(make("b", "", tokenText(from)), " attends to ",
    make("b", "", tokenText(to)), `: ${share}`);
}

buildOverview();
buildHeads();
buildLines();
buildMap();
at("layer").max = layers;
at("special-names").textContent = [...new Set(tokens.filter((_, i) => special[i]))].join(" and ");
at("layer").addEventListener("input", (event) => choose({ layer: event.target.value - 1 }));
at("all-heads").addEventListener("click", () => {
  const all = Array.from({ length: heads }, (_, head) => head);
  choose({ heads: chosen.heads.length === heads ? [0] : all });
});
at("hide-special").addEventListener("change", (e) => choose({ hideSpecial: e.target.checked }));
at("stretch").addEventListener("change", (e) => choose({ stretch: e.target.checked }));
drawOverview();
choose(mostTelling());
fitMap();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  drawOverview();
  choose({});
});
