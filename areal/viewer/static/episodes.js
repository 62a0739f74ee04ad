// The table of episodes: rows are there while they are seen, more are asked for as one scrolls. One line filters, the
// histograms above add to it, and keys move: / to the filter, j and k through rows, Enter into an episode.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("episodes-data").textContent);
  const area = document.getElementById("episodes"), box = document.getElementById("filter");
  const error = document.getElementById("filter-error"), count = document.getElementById("count");
  const list = document.getElementById("completions"), drawn = document.getElementById("histograms");
  const at = Object.fromEntries(data.fields.map((name, index) => [name, index]));
  const HEIGHT = 33, BEYOND = 12, AGAIN = 150;
  const COLUMNS = [
    ["id", "Episode", 74, "n", "id"], ["reward", "Reward", 78, "n", "reward"], ["step", "Step", 64, "n", "step"],
    ["task_id", "Group", 72, "n", "group"], ["tokens", "Tokens", 76, "n", "tokens"], ["calls", "Turns", 66, "n", "calls"],
    ["staleness", "Stale", 64, "n", "staleness"], ["seconds", "Time", 76, "n", "seconds"], ["state", "State", 112, "", null],
    ["preview", "What it said last", null, "preview", null],
  ];
  const MARKS = { trained: "✓", rejected: "✕", ready: "…", running: "▶", retry: "↻" };
  const state = { rows: data.rows, next: data.next, count: data.count, order: data.order, filter: data.filter, selected: -1, busy: false };

  // What a file has is searched here; a served page asks the store.
  const local = data.url ? null : data.rows;
  const names = { group: "task_id", turns: "calls", prompt: "prompt_tokens", version: "oldest_version" };
  const compare = { "<": (a, b) => a < b, "<=": (a, b) => a <= b, ">": (a, b) => a > b, ">=": (a, b) => a >= b };
  const test = (word) => {
    const quoted = /^"(.*)"$/.exec(word);
    if (quoted) { const text = quoted[1].toLowerCase(); return (row) => row[at.preview].toLowerCase().includes(text); }
    if (word.toLowerCase() === "truncated") word = "truncated:yes";
    const parts = /^([a-z_]+)(<=|>=|!=|<|>|=|:)(.+)$/i.exec(word);
    const name = parts && parts[1].toLowerCase();
    if (!parts || !data.columns.includes(name)) throw new Error(`${word} is no filter; write a column and a value, such as reward<0.5, or "text"`);
    const column = at[names[name] || name], value = parts[3].toLowerCase(), operator = parts[2];
    if (name === "truncated") return (row) => row[column] === (value === "yes") === (operator !== "!=");
    if (compare[operator]) return (row) => row[column] != null && compare[operator](row[column], Number(value));
    const range = /^(-?[\d.e]+?)-(-?[\d.e]+)$/.exec(value) || /^(-?[\d.e]*?)\.\.(-?[\d.e]*)$/.exec(value);
    if (range) return (row) => row[column] != null && (range[1] === "" || row[column] >= Number(range[1])) && (range[2] === "" || row[column] <= Number(range[2]));
    const values = value.split(",");
    return (row) => values.includes(String(row[column] ?? "").toLowerCase()) === (operator !== "!=");
  };
  const askHere = ({ filter, order }) => {
    const tests = (filter.match(/"[^"]*"|\S+/g) || []).map(test);
    const down = order.startsWith("-"), name = order.replace("-", ""), column = at[names[name] || name];
    const rows = local.filter((row) => tests.every((each) => each(row)));
    rows.sort((a, b) => ((a[column] == null) - (b[column] == null)) || (down ? -1 : 1) * (a[column] - b[column] || a[0] - b[0]));
    return { rows, next: null, count: rows.length };
  };
  const askStore = async (url, query) => {
    const answer = await fetch(`${url}?${new URLSearchParams(query)}`, { signal: AbortSignal.timeout(30000) });
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error || answer.statusText);
    return found;
  };
  const ask = async (query) => (local ? askHere(query) : askStore(data.url, query));

  // The table
  // The episode's page goes on from here to the next one (reading.js).
  const remember = () => {
    const pages = state.rows.slice(0, 5000).map((row) => new URL(href(row), location.href).pathname);
    try { sessionStorage.setItem("areal-list", JSON.stringify({ pages, count: state.count, back: location.href })); } catch { /* a browser that keeps nothing */ }
  };
  addEventListener("pagehide", remember);
  const cell = (name, row) => {
    const value = row[at[name]];
    if (name === "seconds") return `${value < 10 ? value.toFixed(2) : Math.round(value)} s`;
    if (name === "state") return `${MARKS[value] || "·"} ${row[at.reason] || value}`;
    if (name === "reward") return Number(value.toPrecision(4)).toString().replace("-", "−");
    if (name === "tokens") return value.toLocaleString("en") + (row[at.truncated] ? " ✂" : "");
    return value == null ? "–" : typeof value === "number" ? value.toLocaleString("en") : value;
  };
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  for (const [name, label, width, kind, order] of COLUMNS) {
    const made = document.createElement("th");
    made.scope = "col";
    if (width) made.style.width = `${width}px`;
    if (kind === "n") made.className = "n";
    if (!order) made.textContent = label;
    else {
      const button = document.createElement("button");
      button.type = "button";
      button.dataset.order = order;
      button.addEventListener("click", () => { state.order = state.order === `-${order}` ? order : `-${order}`; search(); });
      made.append(button);
      button.dataset.label = label;
    }
    head.append(made);
  }
  const body = table.createTBody();
  area.append(table);

  const href = (row) => data.episode.replace("{id}", row[at.id]);
  const line = (row, place) => {
    const made = document.createElement("tr");
    made.setAttribute("aria-rowindex", place + 2);
    if (place === state.selected) made.setAttribute("aria-selected", "true");
    for (const [name, , , kind] of COLUMNS) {
      const td = made.insertCell();
      if (kind) td.className = kind;
      if (name === "id") {
        const link = document.createElement("a");
        link.href = href(row);
        link.textContent = row[at.id];
        td.append(link);
      } else if (name === "task_id") {
        const link = document.createElement("a");
        link.href = data.group.replace("{id}", row[at.task_id]);
        link.textContent = row[at.task_id];
        td.append(link);
      } else td.textContent = cell(name, row);
      if (name === "preview") td.dir = "auto";
    }
    made.addEventListener("dblclick", () => { location.href = href(row); });
    made.addEventListener("click", (event) => { if (!event.target.closest("a")) select(place, false); });
    return made;
  };
  const spacer = (height) => {
    const made = document.createElement("tr");
    made.className = "spacer";
    made.setAttribute("aria-hidden", "true");
    const td = made.insertCell();
    td.colSpan = COLUMNS.length;
    td.style.height = `${height}px`;
    return made;
  };
  let window_ = [-1, -1];
  const draw = (force) => {
    const first = Math.max(0, Math.floor(area.scrollTop / HEIGHT) - BEYOND);
    const last = Math.min(state.rows.length, Math.ceil((area.scrollTop + area.clientHeight) / HEIGHT) + BEYOND);
    if (!force && first === window_[0] && last === window_[1]) return;
    window_ = [first, last];
    const made = state.rows.slice(first, last).map((row, offset) => line(row, first + offset));
    body.replaceChildren(spacer(first * HEIGHT), ...made, spacer((state.rows.length - last) * HEIGHT));
    table.setAttribute("aria-rowcount", state.count + 1);
    if (last > state.rows.length - 60) grow();
  };
  const grow = async () => {
    if (state.busy || !state.next) return;
    state.busy = true;
    try {
      const found = await ask({ filter: state.filter, order: state.order, after: JSON.stringify(state.next), limit: 500 });
      state.rows = state.rows.concat(found.rows);
      state.next = found.next;
    } catch (problem) { error.textContent = problem.message; } finally { state.busy = false; }
    draw(true);
  };
  area.addEventListener("scroll", () => requestAnimationFrame(() => draw(false)), { passive: true });
  new ResizeObserver(() => draw(false)).observe(area);

  const select = (place, scroll = true) => {
    if (!state.rows.length) return;
    state.selected = Math.min(Math.max(place, 0), state.rows.length - 1);
    const top = state.selected * HEIGHT;
    if (scroll && top < area.scrollTop) area.scrollTop = top;
    if (scroll && top + 2.5 * HEIGHT > area.scrollTop + area.clientHeight) area.scrollTop = top + 2.5 * HEIGHT - area.clientHeight;
    draw(true);
  };

  // Searching
  let asked = 0;
  const search = async () => {
    const mine = ++asked;
    const query = { filter: state.filter, order: state.order };
    try {
      const found = await ask(query);
      if (mine !== asked) return;
      Object.assign(state, { rows: found.rows, next: found.next, count: found.count, selected: -1 });
      error.textContent = "";
      box.removeAttribute("aria-invalid");
    } catch (problem) {
      if (mine !== asked) return;
      error.textContent = problem.message;
      box.setAttribute("aria-invalid", "true");
      return;
    }
    area.scrollTop = 0;
    show();
    const address = new URLSearchParams();
    if (state.filter) address.set("filter", state.filter);
    if (state.order !== "-id") address.set("order", state.order);
    history.replaceState(null, "", `${location.pathname}${address.size ? `?${address}` : ""}`);
    histograms();
  };
  const show = () => {
    count.textContent = `${state.count.toLocaleString("en")} ${state.count === 1 ? "episode" : "episodes"}`;
    for (const button of head.querySelectorAll("button")) {
      const order = button.dataset.order, is = state.order.replace("-", "") === order, down = state.order.startsWith("-");
      button.textContent = button.dataset.label + (is ? (down ? " ↓" : " ↑") : "");
      button.parentElement.setAttribute("aria-sort", is ? (down ? "descending" : "ascending") : "none");
    }
    draw(true);
  };
  let waiting = 0;
  const typed = () => { clearTimeout(waiting); waiting = setTimeout(() => { state.filter = box.value.trim(); search(); }, AGAIN); };

  // Completion of the word before the caret
  let choices = [], choice = -1;
  const word = () => /[^\s]*$/.exec(box.value.slice(0, box.selectionStart))[0];
  const complete = () => {
    const here = word(), parts = /^([a-z_]+)([:=]|!=)([a-z_,]*)$/i.exec(here);
    choices = [];
    if (parts && data.words[parts[1].toLowerCase()]) {
      const begun = parts[3].split(",").pop();
      choices = data.words[parts[1].toLowerCase()].filter((each) => each.startsWith(begun) && each !== begun).map((each) => [each, here.slice(0, here.length - begun.length) + each]);
    } else if (/^[a-z_]+$/i.test(here)) {
      choices = data.columns.filter((each) => each.startsWith(here.toLowerCase())).map((each) => [each, each + (data.words[each] ? ":" : each === "step" ? ":" : "<")]);
    }
    choice = -1;
    list.replaceChildren(...choices.map(([label, whole], index) => {
      const item = document.createElement("li");
      item.role = "option";
      item.id = `completion-${index}`;
      item.textContent = label;
      item.setAttribute("aria-selected", "false");
      item.addEventListener("pointerdown", (event) => { event.preventDefault(); accept(index); });
      return item;
    }));
    list.hidden = !choices.length;
    box.setAttribute("aria-expanded", String(!list.hidden));
    box.removeAttribute("aria-activedescendant");
  };
  const mark = (index) => {
    choice = (index + choices.length) % choices.length;
    [...list.children].forEach((item, place) => item.setAttribute("aria-selected", String(place === choice)));
    list.children[choice].scrollIntoView({ block: "nearest" });
    box.setAttribute("aria-activedescendant", `completion-${choice}`);
  };
  const accept = (index) => {
    const caret = box.selectionStart, here = word();
    const before = box.value.slice(0, caret - here.length) + choices[index][1];
    box.value = before + box.value.slice(caret);
    box.setSelectionRange(before.length, before.length);
    complete();
    typed();
  };
  const fold = () => { list.hidden = true; choices = []; box.setAttribute("aria-expanded", "false"); };
  box.addEventListener("input", () => { complete(); typed(); });
  box.addEventListener("blur", fold);
  box.addEventListener("keydown", (event) => {
    if (choices.length && (event.key === "ArrowDown" || event.key === "ArrowUp")) { mark(choice + (event.key === "ArrowDown" ? 1 : -1)); event.preventDefault(); }
    else if (choices.length && (event.key === "Tab" || (event.key === "Enter" && choice >= 0)) && !event.shiftKey) { accept(Math.max(choice, 0)); event.preventDefault(); }
    else if (event.key === "Escape") { if (choices.length) { fold(); event.preventDefault(); } else area.focus(); }
    else if (event.key === "Enter") { event.preventDefault(); fold(); state.filter = box.value.trim(); search(); area.focus(); }
  });
  document.getElementById("filter-form").addEventListener("submit", (event) => event.preventDefault());

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, button, a[href]") && event.key === "Enter") return;
    if (event.target.closest("input, select, textarea")) return;
    if (event.key === "/") { box.focus(); box.select(); event.preventDefault(); }
    else if (event.key === "j" || event.key === "k") { area.focus({ preventScroll: true }); select(state.selected + (event.key === "j" ? 1 : -1)); event.preventDefault(); }
    else if (event.key === "Enter" && state.selected >= 0) location.href = href(state.rows[state.selected]);
  });

  // Histograms, which one brushes over
  const NS = "http://www.w3.org/2000/svg";
  const short = (value) => Number(value.toPrecision(3)).toString().replace("-", "−");
  const binned = (name) => {
    const values = state.rows.map((row) => row[at[names[name] || name]]).filter((value) => value != null);
    if (!values.length) return { edges: [], counts: [], unknown: 0 };
    const low = Math.min(...values), high = Math.max(...values), whole = values.every(Number.isInteger);
    const width = whole ? Math.ceil((high - low + 1) / 40) : (high - low) / 40 || 1;
    const bins = whole ? Math.ceil((high - low + 1) / width) : low === high ? 1 : 40;
    const counts = Array(bins).fill(0);
    values.forEach((value) => { counts[Math.min(bins - 1, Math.floor((value - low) / width))] += 1; });
    return { edges: Array.from({ length: bins + 1 }, (_, place) => low + width * place), counts, unknown: 0 };
  };
  const histogram = (name, { edges, counts }) => {
    const figure = document.createElement("figure");
    figure.className = "histogram";
    const caption = document.createElement("figcaption"), ends = document.createElement("div"), svg = document.createElementNS(NS, "svg");
    caption.textContent = name === "calls" ? "turns" : name;
    ends.className = "ends";
    const most = Math.max(1, ...counts), bins = counts.length || 1;
    svg.setAttribute("viewBox", `0 0 ${bins} 100`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    const peak = counts.indexOf(most);
    svg.setAttribute("aria-label", counts.length ? `${name} from ${short(edges[0])} to ${short(edges.at(-1))}, most often ${short(edges[Math.max(0, peak)])}. To choose a range, write ${name}:low-high in the filter.` : `${name}: nothing`);
    counts.forEach((many, place) => {
      const bar = document.createElementNS(NS, "rect"), high = many ? Math.max(3, (96 * many) / most) : 0;
      for (const [key, value] of Object.entries({ x: place + 0.06, y: 100 - high, width: 0.88, height: high, class: "count" })) bar.setAttribute(key, value);
      svg.append(bar);
    });
    const low = document.createElement("span"), high = document.createElement("span");
    if (counts.length) { low.textContent = short(edges[0]); high.textContent = short(edges.at(-1)); }
    ends.append(low, high);
    const brush = document.createElementNS(NS, "rect");
    brush.setAttribute("class", "brush");
    brush.setAttribute("height", 100);
    svg.append(brush);
    let from = null;
    const place = (event) => { const shape = svg.getBoundingClientRect(); return Math.min(bins - 1e-6, Math.max(0, ((event.clientX - shape.left) / shape.width) * bins)); };
    const cover = (a, b) => { const [first, last] = [Math.floor(Math.min(a, b)), Math.floor(Math.max(a, b)) + 1]; brush.setAttribute("x", first); brush.setAttribute("width", last - first); return [first, last]; };
    svg.addEventListener("pointerdown", (event) => { if (!counts.length) return; from = place(event); svg.setPointerCapture(event.pointerId); cover(from, from); });
    svg.addEventListener("pointermove", (event) => { if (from !== null) cover(from, place(event)); });
    svg.addEventListener("pointerup", (event) => {
      if (from === null) return;
      const [first, last] = cover(from, place(event));
      from = null;
      const whole = edges.every(Number.isInteger), low = edges[first], high = whole ? edges[last] - 1 : edges[last];
      const plain = (value) => String(Number(value.toPrecision(6)));
      const others = box.value.split(/\s+(?=(?:[^"]*"[^"]*")*[^"]*$)/).filter((each) => each && !new RegExp(`^${name}(<|>|=|!|:)`, "i").test(each));
      box.value = [...others, low === high ? `${name}=${plain(low)}` : `${name}:${plain(low)}..${plain(high)}`].join(" ");
      state.filter = box.value;
      search();
    });
    figure.append(caption, svg, ends);
    return figure;
  };
  const histograms = async () => {
    const mine = asked;
    const found = await Promise.all(data.brushed.map(async (name) => {
      if (local) return histogram(name, binned(name));
      try { return histogram(name, await askStore(data.histogram_url, { column: name, filter: state.filter })); } catch { return histogram(name, { edges: [], counts: [] }); }
    }));
    if (mine === asked) drawn.replaceChildren(...found);
  };

  if (local) {
    const query = new URLSearchParams(location.search);
    box.value = state.filter = query.get("filter") || "";
    state.order = query.get("order") || "-id";
    search();
  } else {
    error.textContent = data.error;
    show();
    if (!data.error) histograms();
  }
})();
