// Curves with one crosshair: of one run, of several runs, and of what was rejected. Drawn by uPlot.
"use strict";
(() => {
  const area = document.getElementById("charts") || document.getElementById("rejection-chart");
  const read = (id) => { const found = document.getElementById(id); return found && JSON.parse(found.textContent); };
  const run = read("run-data"), compared = read("compare-data"), rejected = read("rejection-data");
  if (!area || !(run || compared || rejected)) return;

  const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3], [12, 4], [4, 4]];
  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);
  const colour = (name) => { probe.style.color = `var(--${name})`; return getComputedStyle(probe).color; };
  const faded = (name, alpha) => colour(name).replace(/^rgb\((.*)\)$/, `rgba($1, ${alpha})`);
  const hue = (place) => (place < 2 ? colour(["accent", "second"][place])
    : `hsl(${(place * 137) % 360} 55% ${matchMedia("(prefers-color-scheme: dark)").matches && document.documentElement.dataset.theme !== "light"
      || document.documentElement.dataset.theme === "dark" ? 65 : 38}%)`);
  const say = (value) => (value == null ? "–" : Number.isInteger(value) ? value.toLocaleString("en") : Number(value.toPrecision(4)).toString());
  const title = (name, titles) => titles[name] || name.replaceAll("_", " ");

  // A running mean that forgets: what came before counts `keep` of what it did, corrected at the start.
  const smooth = (values, keep) => {
    let mean = 0, weight = 0;
    return values.map((value) => {
      if (value == null) return null;
      mean = keep * mean + (1 - keep) * value;
      weight = keep * weight + (1 - keep);
      return mean / weight;
    });
  };

  const charts = [];
  const box = (name, first) => {
    const made = document.createElement("figure");
    made.className = first ? "chart first" : "chart";
    made.style.margin = 0;
    const head = document.createElement("h2");
    head.textContent = name;
    made.append(head);
    made.tabIndex = 0;
    return made;
  };

  // What a chart shows from bottom to top: a line that is flat gets room, and counts begin at 0.
  const heights = (fromZero) => (u, low, high) => {
    if (low == null) return [0, 1];
    if (fromZero || low === high) return [Math.min(0, low), Math.max(high, 0) * 1.1 || 1];
    return uPlot.rangeNum(low, high, 0.1, false);
  };

  // Draws `series` over `across`; `open(place)` is called for a click, or Enter on the crosshair.
  const draw = (parent, name, across, series, { first = false, bands = [], unit = "step", open = null, time = false, fromZero = false } = {}) => {
    const holder = box(name, first);
    parent.append(holder);
    const known = series.filter((each) => each.label).map((each) => `${each.label} from ${say(each.values.find((v) => v != null))} to ${say(each.values.findLast((v) => v != null))}`);
    holder.setAttribute("role", "group");
    holder.setAttribute("aria-label", `${name}: ${known.join(", ")}. Arrow keys move the crosshair${open ? ", Enter opens the step" : ""}.`);
    const axis = { stroke: colour("muted"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    const size = () => ({ width: Math.max(200, holder.clientWidth - 26), height: first ? 250 : 150 });
    const chart = new uPlot({
      ...size(),
      cursor: { sync: { key: "areal" }, points: { size: 6 }, drag: { x: true, y: false } },
      scales: { x: { time: false, range: (u, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) }, y: { range: heights(fromZero) } },
      legend: { live: true },
      axes: [{ ...axis, size: 30, values: time ? (u, ticks) => ticks.map((t) => `${say(t / 60)} min`) : undefined, incrs: time ? undefined : [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000, 100000] },
        { ...axis, size: 56, values: (u, ticks) => ticks.map(say) }],
      series: [{ label: unit, value: (u, v) => say(v) }, ...series.map((each) => ({
        label: each.label || "", stroke: each.stroke, width: each.width ?? 1.5, dash: each.dash, spanGaps: each.spanGaps ?? false,
        points: { show: each.points ?? false, size: 6, fill: each.stroke }, value: (u, v) => say(v),
        paths: each.dotsOnly ? () => null : undefined,
      }))],
      bands,
    }, [across, ...series.map((each) => each.values)], holder);
    const entries = [...chart.root.querySelectorAll(".u-legend .u-series")];
    series.forEach((each, place) => { if (!each.label) entries[place + 1].remove(); });
    let pressed = null;
    chart.over.addEventListener("mousedown", (event) => { pressed = event.clientX; });
    chart.over.addEventListener("mouseup", (event) => {
      if (open && pressed !== null && Math.abs(event.clientX - pressed) < 4 && chart.cursor.idx != null) open(across[chart.cursor.idx]);
    });
    holder.addEventListener("keydown", (event) => {
      const now = chart.cursor.idx ?? -1;
      const next = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: across.length - 1 }[event.key];
      if (next !== undefined) {
        const place = Math.min(Math.max(next, 0), across.length - 1);
        chart.setCursor({ left: chart.valToPos(across[place], "x"), top: 10 });
        event.preventDefault();
      } else if (event.key === "Enter" && open && chart.cursor.idx != null) open(across[chart.cursor.idx]);
    });
    const watch = new ResizeObserver(() => chart.setSize(size()));
    watch.observe(holder);
    charts.push({ chart, watch });
  };

  const clear = () => {
    charts.splice(0).forEach(({ chart, watch }) => { watch.disconnect(); chart.destroy(); });
    area.replaceChildren();
  };

  const keep = () => Number(document.getElementById("smoothing")?.value ?? 0);

  const ordered = (figures, firsts) => {
    const has = (name) => figures[name] && figures[name].some((value) => value != null);
    const first = firsts.filter(has);
    return [first, Object.keys(figures).filter((name) => has(name) && !first.includes(name)).sort()];
  };

  const more = (names, drawOne) => {
    if (!names.length) return;
    const folded = document.createElement("details");
    const summary = document.createElement("summary");
    summary.textContent = `${names.length} more figures`;
    const inside = document.createElement("div");
    inside.className = "charts";
    folded.style.gridColumn = "1 / -1";
    folded.append(summary, inside);
    folded.addEventListener("toggle", () => { if (folded.open && !inside.childElementCount) names.forEach((name) => drawOne(inside, name)); });
    area.append(folded);
  };

  const drawRun = () => {
    const { steps, figures, held_out: heldOut, titles } = run;
    const open = (step) => { location.href = run.episodes.replace("%7Bstep%7D", String(step)); };
    const one = (parent, name) => {
      const values = figures[name];
      const smoothed = keep() > 0;
      const series = [{ label: smoothed ? "" : title(name, titles), values, stroke: smoothed ? faded("muted", 0.5) : colour("ink"), width: 1, points: steps.length < 3 }];
      if (smoothed) series.push({ label: title(name, titles), values: smooth(values, keep()), stroke: colour("ink"), width: 2 });
      if (name !== "reward") { draw(parent, title(name, titles), steps, series, { open, fromZero: name === "rejected" }); return; }
      const points = [...heldOut.sampled, ...heldOut.greedy];
      const across = [...new Set([...steps, ...points.map((point) => point[0])])].sort((a, b) => a - b);
      const place = new Map(across.map((step, index) => [step, index]));
      const spread = (pairs) => { const made = Array(across.length).fill(null); pairs.forEach(([step, value]) => { made[place.get(step)] = value; }); return made; };
      series.forEach((each) => { each.values = spread(each.values.map((value, index) => [steps[index], value])); each.spanGaps = true; });
      const bands = [];
      if (heldOut.sampled.length) {
        const column = (index) => spread(heldOut.sampled.map((point) => [point[0], point[index]]));
        series.push({ label: "held-out, sampled", values: column(1), stroke: colour("accent"), points: true, spanGaps: true, dash: [6, 3] });
        series.push({ label: "", values: column(3), stroke: "transparent", width: 0, spanGaps: true });
        series.push({ label: "", values: column(2), stroke: "transparent", width: 0, spanGaps: true });
        bands.push({ series: [series.length - 1, series.length], fill: faded("accent", 0.13) });
      }
      if (heldOut.greedy.length) series.push({ label: "held-out, greedy", values: spread(heldOut.greedy), stroke: colour("second"), points: true, dotsOnly: true });
      draw(parent, heldOut.sampled.length ? "Reward and held-out, with 95 % intervals" : "Reward", across, series, { first: true, bands, open: (step) => step > 0 && open(step) });
    };
    if (!steps.length && !heldOut.sampled.length) {
      const none = document.createElement("p");
      none.textContent = "No step has been trained yet.";
      area.append(none);
      return;
    }
    if (!figures.reward && heldOut.sampled.length) figures.reward = steps.map(() => null);
    const [first, rest] = ordered(figures, run.first);
    first.forEach((name) => one(area, name));
    more(rest, one);
  };

  const drawCompared = () => {
    const { runs, titles } = compared;
    const byTime = document.getElementById("axis").value === "time";
    const joined = (pick) => {
      const tables = runs.map(pick);
      const across = [...new Set(tables.flatMap(([xs]) => xs))].filter((x) => x != null).sort((a, b) => a - b);
      const place = new Map(across.map((x, index) => [x, index]));
      return [across, tables.map(([xs, ys]) => { const made = Array(across.length).fill(null); xs.forEach((x, i) => { if (x != null) made[place.get(x)] = ys[i]; }); return made; })];
    };
    const one = (parent, name, label, pick, options = {}) => {
      const [across, columns] = joined(pick);
      const series = columns.map((values, index) => ({ label: runs[index].name, values, stroke: hue(index), dash: DASHES[index % DASHES.length], spanGaps: true, ...options }));
      draw(parent, label, across, series, { first: name === "reward", unit: byTime ? "seconds" : "step", time: byTime });
    };
    const figure = (parent, name) => one(parent, name, title(name, titles), (each) => [byTime ? each.times : each.steps, smooth(each.figures[name] || each.steps.map(() => null), keep())]);
    const all = {};
    runs.forEach((each) => Object.entries(each.figures).forEach(([name, values]) => { all[name] = (all[name] || []).concat(values); }));
    const [first, rest] = ordered(all, compared.first);
    first.slice(0, 1).forEach((name) => figure(area, name));
    if (runs.some((each) => each.held_out.sampled.length)) {
      one(area, "held_out", "Held-out reward, sampled", (each) => [each.held_out.sampled.map((p) => (byTime ? p[4] : p[0])), each.held_out.sampled.map((p) => p[1])], { points: true });
    }
    first.slice(1).forEach((name) => figure(area, name));
    more(rest, figure);
  };

  const drawRejected = () => {
    const across = [...new Set(rejected.by_step.flatMap((pairs) => pairs.map(([step]) => step)))].sort((a, b) => a - b);
    const place = new Map(across.map((step, index) => [step, index]));
    const series = rejected.by_step.map((pairs, index) => {
      const values = Array(across.length).fill(0);
      pairs.forEach(([step, count]) => { values[place.get(step)] = count; });
      return { label: rejected.reasons[index], values, stroke: hue(index), dash: DASHES[index % DASHES.length], points: true };
    });
    const open = (step) => { location.href = rejected.episodes.replace("%7Bstep%7D", String(step)); };
    draw(area, "Rejected episodes by reason", across, series, { first: true, open, fromZero: true });
  };

  const show = () => { clear(); if (run) drawRun(); else if (compared) drawCompared(); else drawRejected(); };
  document.addEventListener("areal-theme", show);
  document.addEventListener("areal-figures", (event) => { Object.assign(run, event.detail); show(); });
  document.querySelectorAll("#smoothing, #axis").forEach((each) => each.addEventListener("change", show));
  show();
})();
