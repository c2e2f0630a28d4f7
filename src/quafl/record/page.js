// The curves of a report, drawn from the rows in the page: what is where, what is hidden, and what a pointer is at.
"use strict";
(() => {
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const PLACES = 200; // on a curve; these three are as in plots.py
  const FAR_APART = 4; // times as far as another curve: on a linear axis the shorter one could hardly be seen
  const BEGINNING = 0.05; // of a curve: what it does there, far from all others, need not be seen
  const WIDEST = 30; // places on either side that smoothing averages over, at most
  const SVG = "http://www.w3.org/2000/svg";
  const shared = { hidden: new Set(), seeds: false, band: true, smoothing: 0 }; // by all panels
  const panels = [];

  // Elements

  function made(name, attributes = {}, ...children) {
    const inSvg = ["svg", "g", "path", "line", "text", "circle", "rect", "clipPath", "defs"].includes(name);
    const element = inSvg ? document.createElementNS(SVG, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
      else if (value === true) element.setAttribute(key, "");
      else if (value !== false && value !== null) element.setAttribute(key, value);
    }
    element.append(...children);
    return element;
  }

  const ink = (curve) => ({ class: "ink", style: `--c:${curve.colour}` });
  const swatch = (curve) =>
    made("svg", { ...ink(curve), class: "swatch ink", viewBox: "0 0 26 4", "aria-hidden": "true" },
      made("line", { x1: 0, x2: 26, y1: 2, y2: 2, "stroke-dasharray": curve.dash }));
  const tick = (text, checked, change) => {
    const box = made("input", { type: "checkbox", checked, onchange: () => change(box.checked) });
    return made("label", {}, box, ` ${text}`);
  };
  const chosen = (title, options, value, change) => {
    const list = made("select", { "aria-label": title, onchange: () => change(list.value) });
    for (const [key, label] of options) list.append(made("option", { value: key, selected: key === value }, label));
    return list;
  };

  // Numbers

  const spoken = (name) => name.replaceAll("_", " ");
  const named = (name) => DATA.axes[name] ?? spoken(name);

  function shown(value, digits = 4) {
    if (value !== 0 && Math.abs(value) < 1e-3) return value.toExponential(1);
    const notation = Math.abs(value) >= 1e5 ? "compact" : "standard";
    return new Intl.NumberFormat("en", { notation, maximumSignificantDigits: digits }).format(value);
  }

  function column(seed, name) {
    const { bytes_up: up, bytes_down: down } = seed.columns;
    return name === "megabytes" ? up.map((octets, i) => (octets + down[i]) / 1e6) : seed.columns[name];
  }

  // Where a seed's line goes. A model stands until the next round ends; between evaluations that are more than a round
  // apart there were others, and the line is straight.
  function points(seed, x, y) {
    const [xs, ys, rounds] = [x, y, "round"].map((name) => column(seed, name));
    const places = [], values = [];
    let last = -1;
    ys.forEach((value, i) => {
      if (value === null || xs[i] === null) return;
      if (last >= 0 && rounds[i] - rounds[last] === 1) {
        places.push(xs[i]);
        values.push(ys[last]);
      }
      places.push(xs[i]);
      values.push(value);
      last = i;
    });
    return { places, values, end: x === "time" ? Math.max(seed.end, places.at(-1)) : places.at(-1) };
  }

  function at(grid, { places, values }) {
    let i = 0;
    return grid.map((place) => {
      while (i + 1 < places.length && places[i + 1] <= place) i++;
      if (place <= places[0] || i + 1 === places.length) return values[place <= places[0] ? 0 : i];
      const share = (place - places[i]) / (places[i + 1] - places[i]);
      return values[i] + share * (values[i + 1] - values[i]);
    });
  }

  // The mean of each value and its neighbours, as many on either side.
  function smoothed(values) {
    return values.map((value, i) => {
      const side = Math.min(shared.smoothing, i, values.length - 1 - i);
      const near = values.slice(i - side, i + side + 1);
      return near.reduce((sum, one) => sum + one, 0) / near.length;
    });
  }

  function grid(from, to, log) {
    return Array.from({ length: PLACES }, (_, i) => {
      const share = i / (PLACES - 1);
      return log ? from * (to / from) ** share : from + share * (to - from);
    });
  }

  // What is to be drawn: of each curve its places, the mean over seeds, one standard deviation, and each seed's line.
  function lines(panel) {
    const { x, y } = panel;
    const able = DATA.curves.filter((curve) => curve.seeds.some((seed) => seed.columns[y]));
    const talking = able.filter((curve) => x !== "megabytes" || curve.talks);
    const mine = (talking.length ? talking : able).filter((curve) => !shared.hidden.has(curve.label));
    const known = mine
      .map((curve) => ({ curve, seeds: curve.seeds.map((seed) => points(seed, x, y)).filter((s) => s.places.length) }))
      .filter(({ seeds }) => seeds.length);
    const ends = known.map(({ seeds }) => Math.min(...seeds.map((seed) => seed.end)));
    const positive = ends.filter((end) => end > 0);
    const least = Math.min(...positive), most = Math.max(...positive);
    const logX = positive.length > 0 && (panel.logX ?? (x !== "time" && FAR_APART * least < most));
    const drawn = known.map(({ curve, seeds }, number) => {
      const places = grid(logX ? BEGINNING * least : 0, Math.max(ends[number], logX ? least : 0), logX);
      const values = seeds.map((seed) => smoothed(at(places, seed)));
      const middle = places.map((_, i) => values.reduce((sum, one) => sum + one[i], 0) / values.length);
      const spread = places.map((_, i) => {
        const squares = values.reduce((sum, one) => sum + (one[i] - middle[i]) ** 2, 0);
        return values.length > 1 ? Math.sqrt(squares / (values.length - 1)) : 0;
      });
      return { curve, places, values, middle, spread };
    });
    return { drawn, logX };
  }

  // The least and the greatest value that must be seen, with the target where that costs the curves little.
  function range(drawn, logY, goal) {
    const seen = drawn.flatMap(({ places, values, middle, spread }) =>
      places.flatMap((place, i) => {
        if (place < BEGINNING * places.at(-1)) return [];
        const edges = shared.band ? [middle[i] - spread[i], middle[i] + spread[i]] : [middle[i]];
        return shared.seeds ? [...edges, ...values.map((one) => one[i])] : edges;
      })).filter((value) => Number.isFinite(value) && (!logY || value > 0));
    if (!seen.length) return null;
    let low = seen.reduce((a, b) => Math.min(a, b)), high = seen.reduce((a, b) => Math.max(a, b));
    const near = goal !== null && goal >= low - 0.1 * (high - low) && goal <= high + 0.1 * (high - low);
    if (near && (!logY || goal > 0)) [low, high] = [Math.min(low, goal), Math.max(high, goal)];
    if (low === high) [low, high] = logY ? [low / 2, high * 2] : [low - 0.5, high + 0.5];
    const margin = 0.05 * (high - low);
    return logY ? { low: low / 1.05, high: high * 1.05, near } : { low: low - margin, high: high + margin, near };
  }

  // Axes

  function scale(low, high, from, to, log) {
    const place = log ? Math.log : (value) => value;
    const back = log ? Math.exp : (value) => value;
    const [a, b] = [place(low), place(high)];
    return {
      to: (value) => from + ((place(value) - a) / (b - a)) * (to - from),
      back: (pixel) => back(a + ((pixel - from) / (to - from)) * (b - a)),
    };
  }

  function ticks(low, high, log, most) {
    if (log && high / low > 4) {
      const powers = [];
      for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++) powers.push(power);
      for (const multiples of [[1, 2, 5], [1]]) {
        const found = powers.flatMap((power) => multiples.map((multiple) => multiple * 10 ** power));
        const within = found.filter((value) => value >= low && value <= high);
        if (within.length <= most || multiples.length === 1) {
          return within.filter((_, i) => i % Math.ceil(within.length / most) === 0);
        }
      }
    }
    const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((multiple) => multiple * power).find((size) => size >= rough);
    const found = [];
    for (let i = Math.ceil(low / step); i * step <= high + 1e-9 * step; i++) {
      found.push(Number((i * step).toPrecision(12)));
    }
    return found;
  }

  // One panel

  function draw(panel) {
    panel.width = panel.box.clientWidth;
    const width = Math.max(panel.width, 240), height = Math.round(Math.min(340, Math.max(230, width * 0.6)));
    const { drawn, logX } = lines(panel);
    const goal = panel.y === DATA.metric ? DATA.target : null;
    const logY = panel.logY && drawn.some(({ middle }) => middle.some((value) => value > 0));
    const values = range(drawn, logY, goal);
    panel.logXBox.checked = logX;
    panel.place = null;
    panel.tip.hidden = true;
    const picture = made("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" });
    panel.box.replaceChildren(picture, panel.tip);
    if (values === null) {
      picture.append(made("text", { x: width / 2, y: height / 2, class: "middle" }, "nothing to draw here"));
      panel.shown = null;
      return;
    }
    const left = 52, right = width - 16, top = 10, bottom = height - 40;
    const far = Math.max(...drawn.map(({ places }) => places.at(-1))) || 1;
    const x = scale(logX ? Math.min(...drawn.map(({ places }) => places[0])) : 0, far, left, right, logX);
    const y = scale(values.low, values.high, bottom, top, logY);
    const clip = `clip-${panel.number}`;
    picture.append(made("defs", {}, made("clipPath", { id: clip },
      made("rect", { x: left, y: top, width: right - left, height: bottom - top }))));
    for (const value of ticks(x.back(left), x.back(right), logX, Math.max(3, width / 60))) {
      picture.append(made("line", { class: "rule", x1: x.to(value), x2: x.to(value), y1: top, y2: bottom }));
      picture.append(made("text", { x: x.to(value), y: bottom + 16, class: "middle" }, shown(value)));
    }
    for (const value of ticks(values.low, values.high, logY, height / 45)) {
      picture.append(made("line", { class: "rule", x1: left, x2: right, y1: y.to(value), y2: y.to(value) }));
      picture.append(made("text", { x: left - 6, y: y.to(value) + 4, class: "end" }, shown(value)));
    }
    picture.append(made("text", { x: (left + right) / 2, y: height - 6, class: "middle name" }, named(panel.x)));
    const sideways = `translate(12 ${(top + bottom) / 2}) rotate(-90)`;
    picture.append(made("text", { transform: sideways, class: "middle name" }, named(panel.y)));
    const inside = made("g", { "clip-path": `url(#${clip})` });
    for (const line of [...drawn].reverse()) inside.append(...strokes(line, x, y)); // the first is what it is about
    picture.append(inside);
    if (values.near) {
      picture.append(made("line", { class: "goal", x1: left, x2: right, y1: y.to(goal), y2: y.to(goal) }));
      picture.append(made("text", { x: left + 4, y: y.to(goal) - 4, class: "halo" }, `target ${goal}`));
    }
    panel.shown = { picture, drawn, x, y, left, right, top, bottom };
  }

  function strokes({ curve, places, values, middle, spread }, x, y) {
    const path = (some) => {
      let pen = "M";
      return places.map((place, i) => {
        const value = y.to(some[i]);
        if (!Number.isFinite(value)) { pen = "M"; return ""; }
        const text = `${pen}${x.to(place).toFixed(1)} ${Math.max(-1e4, Math.min(1e4, value)).toFixed(1)}`;
        pen = "L";
        return text;
      }).join("");
    };
    const found = [];
    if (shared.band && values.length > 1) {
      const lowest = y.back(1e4); // of a logarithmic axis: what is below zero is far below the picture
      const edge = (i, sign) => [x.to(places[i]), y.to(Math.max(lowest, middle[i] + sign * spread[i]))];
      const order = [...places.keys()];
      const corners = [...order.map((i) => edge(i, 1)), ...order.reverse().map((i) => edge(i, -1))];
      const sound = corners.filter((corner) => corner.every(Number.isFinite));
      const around = sound.map((corner) => corner.map((pixel) => pixel.toFixed(1)).join(" ")).join("L");
      found.push(made("path", { ...ink(curve), class: "band ink", d: `M${around}Z` }));
    }
    if (shared.seeds) {
      for (const one of values) found.push(made("path", { ...ink(curve), class: "seed ink", d: path(one) }));
    }
    found.push(made("path", {
      ...ink(curve), class: "curve ink", d: path(middle), "stroke-dasharray": curve.dash, "data-label": curve.label,
    }));
    return found;
  }

  // What the pointer, or the cursor of the keyboard, is at

  function point(panel, pixel) {
    panel.shown?.picture.querySelector(".cursor")?.remove();
    panel.place = null;
    panel.tip.hidden = true;
    if (!panel.shown || pixel === null) return;
    const { picture, drawn, x, y, left, right, top, bottom } = panel.shown;
    const place = Math.max(left, Math.min(right, pixel)), value = x.back(place);
    const cursor = made("g", { class: "cursor" }, made("line", { x1: place, x2: place, y1: top, y2: bottom }));
    const found = drawn.filter(({ places }) => value <= places.at(-1) * 1.000001);
    const rows = found.map(({ curve, places, middle, spread, values }) => {
      const i = places.reduce((best, one, j) => (Math.abs(one - value) < Math.abs(places[best] - value) ? j : best), 0);
      const height = y.to(middle[i]);
      if (height >= top && height <= bottom) {
        cursor.append(made("circle", { ...ink(curve), cx: place, cy: height, r: 4 }));
      }
      const more = values.length > 1 ? ` ± ${shown(spread[i], 2)}` : "";
      return made("div", {}, swatch(curve), ` ${curve.label} `, made("b", {}, shown(middle[i]) + more));
    });
    picture.append(cursor);
    panel.place = place;
    panel.tip.replaceChildren(made("div", { class: "small" }, `${named(panel.x)}: ${shown(value)}`), ...rows);
    panel.tip.hidden = false;
    const room = panel.box.clientWidth - panel.tip.offsetWidth;
    const beside = place + 14 > room ? place - panel.tip.offsetWidth - 14 : place + 14;
    panel.tip.style.left = `${Math.max(0, Math.min(room, beside))}px`;
  }

  function steer(panel, event) {
    if (!panel.shown) return;
    const { left, right } = panel.shown, here = panel.place ?? left;
    const step = (right - left) / 50;
    const moves = { ArrowLeft: here - step, ArrowRight: here + step, Home: left, End: right };
    if (event.key === "Escape") point(panel, null);
    else if (event.key in moves) point(panel, moves[event.key]);
    else return;
    event.preventDefault();
  }

  function begin(wanted, number) {
    const panel = { ...wanted, number, logX: null, logY: wanted.log };
    const change = (some) => { Object.assign(panel, some); draw(panel); };
    const xs = Object.entries(DATA.axes), ys = DATA.metrics.map((name) => [name, spoken(name)]);
    panel.box = made("div", {
      class: "box", tabindex: "0", role: "group",
      "aria-label": "A picture of the curves: the arrow keys read out values, Escape ends that",
      onpointermove: (event) => point(panel, event.clientX - panel.box.getBoundingClientRect().left),
      onpointerdown: (event) => point(panel, event.clientX - panel.box.getBoundingClientRect().left),
      onpointerleave: () => point(panel, null),
      onblur: () => point(panel, null),
      onkeydown: (event) => steer(panel, event),
    });
    panel.tip = made("div", { class: "tip", role: "status", hidden: true });
    const logX = tick("log x", false, (on) => change({ logX: on }));
    panel.logXBox = logX.querySelector("input");
    const head = made("div", { class: "head" },
      chosen("Vertical axis", ys, panel.y, (y) => change({ y })), " against ",
      chosen("Horizontal axis", xs, panel.x, (x) => change({ x, logX: null })),
      made("span", {}, logX, " ", tick("log y", panel.logY, (on) => change({ logY: on }))));
    document.getElementById("panels").append(made("section", { class: "panel" }, head, panel.box));
    panels.push(panel);
    draw(panel);
    new ResizeObserver(() => requestAnimationFrame(() => {
      if (panel.width !== panel.box.clientWidth) draw(panel);
    })).observe(panel.box);
  }

  // What all panels share

  const redraw = () => panels.forEach(draw);

  function hide(labels) {
    shared.hidden = labels;
    for (const button of document.querySelectorAll("#legend button")) {
      button.setAttribute("aria-pressed", String(!labels.has(button.dataset.label)));
    }
    redraw();
  }

  function toggle(label) {
    const hidden = new Set(shared.hidden);
    if (!hidden.delete(label)) hidden.add(label);
    hide(hidden);
  }

  // That curve alone; if it is alone already, all of them.
  function isolate(label) {
    const others = DATA.curves.map((curve) => curve.label).filter((other) => other !== label);
    const alone = others.every((other) => shared.hidden.has(other)) && !shared.hidden.has(label);
    hide(new Set(alone ? [] : others));
  }

  function legend() {
    const place = document.getElementById("legend");
    for (const curve of DATA.curves) {
      place.append(made("button", {
        type: "button", "aria-pressed": "true", "data-label": curve.label,
        onclick: () => toggle(curve.label), // of a double click, the second takes back the first
        ondblclick: () => isolate(curve.label),
        onkeydown: (event) => { if (event.key === "i") isolate(curve.label); },
      }, swatch(curve), ` ${curve.label}`));
    }
  }

  function csv() {
    const every = DATA.curves.flatMap((curve) => curve.seeds.flatMap((seed) => Object.keys(seed.columns)));
    const names = [...new Set(every)];
    const rows = [["curve", "seed", ...names]];
    for (const { label, seeds } of DATA.curves) {
      for (const { seed, columns } of seeds) {
        columns.time.forEach((_, i) => rows.push([label, seed, ...names.map((name) => columns[name]?.[i] ?? "nan")]));
      }
    }
    const quoted = (cell) => (/[",\n]/.test(cell) ? `"${String(cell).replaceAll('"', '""')}"` : cell);
    return rows.map((row) => row.map(quoted).join(",") + "\n").join("");
  }

  function download() {
    const url = URL.createObjectURL(new Blob([csv()], { type: "text/csv" }));
    const link = made("a", { href: url, download: "quafl-report.csv" });
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }

  function tools() {
    const smoothing = made("input", {
      type: "range", min: 0, max: WIDEST, value: 0, "aria-label": "smoothing",
      oninput: () => { shared.smoothing = Number(smoothing.value); redraw(); },
    });
    const themes = [["", "as the system"], ["light", "light"], ["dark", "dark"]];
    const dress = (theme) => { document.documentElement.dataset.theme = theme; };
    document.getElementById("tools").append(
      tick("each seed", shared.seeds, (on) => { shared.seeds = on; redraw(); }),
      tick("band", shared.band, (on) => { shared.band = on; redraw(); }),
      made("label", {}, "smoothing ", smoothing),
      made("label", {}, "colours ", chosen("colours", themes, "", dress)),
      made("button", { type: "button", onclick: () => hide(new Set()) }, "show all"),
      made("button", { type: "button", onclick: download }, "rows as CSV"));
  }

  document.documentElement.classList.add("live"); // the pictures that need no script make room
  legend();
  tools();
  DATA.panels.forEach(begin);
})();
