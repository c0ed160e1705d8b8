// The panel with lines from each token to the tokens that it attends to.

// While no token is selected, only the strongest lines are drawn; else all lines of the token.
const MOST_LINES = 3000;
const SHOWN = 5;
let looked = null; // {side: "from" or "to", token, kept}

function buildLines() {
  document.documentElement.style.setProperty("--count", count);
  at("lines").style.setProperty("--row", `${count <= 28 ? 26 : count <= 60 ? 22 : 18}px`);
  at("curves").setAttribute("viewBox", `0 0 100 ${count}`);
  for (const side of ["from", "to"]) {
    const list = at(side);
    for (let token = 0; token < count; token += 1) {
      const item = make("div", "token", tokenText(token), make("b"));
      item.id = `${side}-${token}`;
      item.setAttribute("role", "option");
      item.title = words[token] && words[token] !== tokens[token] ? `text: ${words[token]}` : "";
      if (fills[token]) item.title = `model: ${fills[token]}`;
      if (special[token]) item.classList.add("special");
      if (token === secondStart) item.classList.add("second");
      list.append(item);
    }
    const tokenOf = (event) => {
      const item = event.target.closest(".token");
      return item ? Number(item.id.split("-")[1]) : null;
    };
    list.addEventListener("pointerover", (event) => {
      const token = tokenOf(event);
      if (token !== null && !looked?.kept) look({ side, token });
    });
    list.addEventListener("pointerleave", () => looked?.kept || look(null));
    list.addEventListener("click", (event) => {
      const token = tokenOf(event);
      if (token === null) return;
      const again = looked?.kept && looked.side === side && looked.token === token;
      look(again ? null : { side, token, kept: true });
    });
    list.addEventListener("focus", () => {
      if (!looked && list.matches(":focus-visible")) look({ side, token: 0 });
    });
    list.addEventListener("blur", () => looked?.kept || look(null));
    list.addEventListener("keydown", (event) => {
      const here = looked?.side === side ? looked.token : -1;
      const to = { ArrowUp: here - 1, ArrowDown: here + 1, Home: 0, End: count - 1 }[event.key];
      if (event.key === "Escape") look(null);
      else if (event.key === "Enter" && here >= 0) look({ ...looked, kept: !looked.kept });
      else if (to >= 0 && to < count) {
        look({ side, token: to });
        at(`${side}-${to}`).scrollIntoView({ block: "nearest" });
      } else return;
      event.preventDefault();
    });
  }
}

function look(now) {
  looked = now;
  drawLines();
}

/** Calls `visit(byte, head, from, to)` for each line of the selected token, else of all tokens. */
function eachLine(visit) {
  const tokensOf = (side) =>
    looked?.side === side ? [looked.token] : Array.from({ length: count }, (_, token) => token);
  for (const from of tokensOf("from")) {
    for (const to of tokensOf("to")) {
      if (leftOut(from) || leftOut(to)) continue;
      for (const head of chosen.heads) {
        const byte = byteOf(chosen.layer, head, from, to);
        if (byte > 0) visit(byte, head, from, to);
      }
    }
  }
}

/** Returns the lines to draw, the strongest last, and the total number of lines. */
function linesToDraw() {
  const having = new Array(256).fill(0);
  eachLine((byte) => { having[byte] += 1; });
  const total = having.reduce((sum, number) => sum + number, 0);
  let least = 255;
  let above = 0;
  while (least > 1 && (looked || above + having[least] <= MOST_LINES)) above += having[least--];
  // Not all lines of the weakest weight fit; take every n-th, not only those of the first tokens.
  const every = looked ? 1 : Math.max(1, Math.ceil(having[least] / (MOST_LINES - above)));
  const lines = [];
  let equal = 0;
  eachLine((byte, head, from, to) => {
    if (byte > least || (byte === least && equal++ % every === 0)) {
      lines.push([WEIGHT_OF[byte], head, from, to]);
    }
  });
  return { lines: lines.sort((a, b) => a[0] - b[0]), total };
}

function drawLines() {
  const { lines, total } = linesToDraw();
  const most = chosen.stretch && lines.length ? lines[lines.length - 1][0] : 1;
  // Lines of different heads are drawn beside each other.
  const gap = Math.min(0.1, 0.7 / chosen.heads.length);
  const curves = lines.map(([share, head, from, to]) => {
    const aside = 0.5 + gap * (chosen.heads.indexOf(head) - (chosen.heads.length - 1) / 2);
    const [y1, y2] = [from + aside, to + aside];
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    path.setAttribute("d", `M0 ${y1}C45 ${y1} 55 ${y2} 100 ${y2}`);
    path.setAttribute("stroke-opacity", share / most);
    path.style.stroke = headColour(head);
    Object.assign(path.dataset, { from, to, head });
    return path;
  });
  at("curves").replaceChildren(...curves);
  at("curves").classList.toggle("one", looked !== null);
  showTokens();
  showSentence(lines.length < total);
}

function showTokens() {
  const single = chosen.heads.length === 1 ? headColour(chosen.heads[0]) : "var(--accent)";
  at("lines").style.setProperty("--strong", single);
  for (const side of ["from", "to"]) {
    const list = at(side);
    const answers = looked !== null && looked.side !== side;
    list.classList.toggle("answer", answers);
    list.removeAttribute("aria-activedescendant");
    [...list.children].forEach((item, token) => {
      const active = looked?.side === side && looked.token === token;
      if (active) list.setAttribute("aria-activedescendant", item.id);
      item.classList.toggle("active", active);
      item.classList.toggle("kept", active && Boolean(looked.kept));
      item.classList.toggle("left-out", Boolean(leftOut(token)));
      item.setAttribute("aria-selected", active);
      const share = answers ? sharesOfLooked(token) : 0;
      item.lastChild.textContent = answers && !leftOut(token) ? percent(share) : "";
      item.lastChild.classList.toggle("faint", share < 0.01);
      item.style.setProperty("--strength", `${(70 * share).toFixed(1)}%`);
    });
  }
}

/** Returns the mean weight between the selected token and another, in the chosen direction. */
function sharesOfLooked(other) {
  const [from, to] = looked.side === "from" ? [looked.token, other] : [other, looked.token];
  return meanWeight(chosen.heads, from, to);
}

function showSentence(hidden) {
  const note = at("lines-note");
  if (!looked) {
    const drawn = hidden
      ? "Only the strongest lines are drawn. Point at a token to see all its lines; "
      : "The opacity of a line is its weight. Point at a token to see only its lines; ";
    note.replaceChildren(`${drawn}click to keep the token selected.`);
    return;
  }
  const others = Array.from({ length: count }, (_, token) => token)
    .filter((token) => !leftOut(token))
    .sort((a, b) => sharesOfLooked(b) - sharesOfLooked(a))
    .slice(0, SHOWN);
  const name = make("b", "", tokenText(looked.token));
  const verb = looked.side === "from" ? " attends to " : " is attended to by ";
  const mean = chosen.heads.length > 1 ? ` (mean of ${chosen.heads.length} heads)` : "";
  const parts = others.flatMap((token, place) => [
    place ? ", " : "", tokenText(token), ` ${percent(sharesOfLooked(token))}`,
  ]);
  note.replaceChildren(name, verb, ...parts, `${mean}.`);
}
