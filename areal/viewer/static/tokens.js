// The tokens of an episode, coloured by a figure. Colour is never alone: signs are underlined differently, and every
// number is told for the token under the pointer or the focus. Arrow keys move from token to token.
"use strict";
(() => {
  const section = document.getElementById("tokens");
  const tabs = document.querySelector(".tabs");
  if (!section || !tabs) return;
  const { rows } = JSON.parse(document.getElementById("token-data").textContent);
  const area = document.getElementById("token-rows"), facts = document.getElementById("token-facts");
  const legend = document.getElementById("legend"), chooser = document.getElementById("colour");
  const tokens = [], FOLD = 60;
  let active = null;

  const shape = (text) => text.replaceAll("\n", "↵\n").replaceAll("\t", "→\t");
  const say = (value, digits = 4) => (value == null ? "–" : Number(value.toPrecision(digits)).toString().replace("-", "−"));
  const ratio = (token) => (token.trainer == null || token.logprob == null ? null : Math.exp(token.trainer - token.logprob));

  const build = () => {
    rows.forEach((row, number) => {
      if (rows.length > 1 || row.first) {
        const head = document.createElement("h3");
        head.textContent = `Row ${number}` + (row.first ? `, from token ${row.first.toLocaleString("en")}` : "");
        area.append(head);
      }
      const line = document.createElement("div");
      line.className = "token-row";
      // A long prompt is folded: what the model said is what people came for.
      let prompt = [];
      const close = () => {
        if (prompt.length > FOLD) {
          const hidden = prompt.slice(0, -FOLD / 3), button = document.createElement("button");
          button.type = "button";
          button.textContent = `… ${hidden.length.toLocaleString("en")} prompt tokens`;
          button.addEventListener("click", () => button.replaceWith(...hidden));
          line.append(button, ...prompt.slice(-FOLD / 3));
        } else line.append(...prompt);
        prompt = [];
      };
      const where = new Map(row.at.map((place, index) => [place, index]));
      row.text.forEach((text, place) => {
        const span = document.createElement("span");
        span.textContent = shape(text);
        const index = where.get(place);
        if (index === undefined) {
          span.className = "tk prompt";
          prompt.push(span);
        } else {
          close();
          const token = { span, text, id: row.id[place], place: row.first + place, row: number };
          for (const name of ["logprob", "trainer", "advantage", "entropy", "returns", "version", "completion", "trained", "left"]) token[name] = row[name][index];
          span.dataset.token = tokens.length;
          span.tabIndex = tokens.length ? -1 : 0;
          tokens.push(token);
          line.append(span);
        }
      });
      close();
      area.append(line);
    });
  };

  const largest = () => tokens.reduce((most, token) => Math.max(most, Math.abs(token.advantage ?? 0)), 0) || 1;
  const level = (size, edges) => edges.filter((edge) => size >= edge).length;
  const paints = {
    logprob: (token) => (token.logprob == null ? "none" : `rare-${1 + level(-token.logprob, [0.1, 0.7, 1.6, 3])}`),
    ratio: (token) => {
      const value = ratio(token);
      if (value == null) return "none";
      const size = Math.abs(Math.log(value));
      const depth = level(size, [0.001, 0.05, 0.2]);
      return depth === 0 ? "" : `${value > 1 ? "up" : "down"}-${depth}`;
    },
    advantage: (token, most) => {
      if (token.advantage == null) return "none";
      if (token.advantage === 0) return "";
      const depth = 1 + level(Math.abs(token.advantage) / most, [1 / 3, 2 / 3]);
      return `${token.advantage > 0 ? "up" : "down"}-${depth}`;
    },
    entropy: (token) => (token.entropy == null ? "none" : `rare-${1 + level(token.entropy, [0.1, 0.5, 1, 2])}`),
    version: (token) => (token.version % 2 ? "odd" : "even"),
  };
  const legends = {
    logprob: () => [["rare-1", "p ≥ 90 %"], ["rare-2", "≥ 50 %"], ["rare-3", "≥ 20 %"], ["rare-4", "≥ 5 %, underlined"], ["rare-5", "rarer"]],
    ratio: () => [["down-3", "÷ 1.2 and more"], ["down-2", "÷ 1.05"], ["down-1", "below 1, dotted"], ["", "1"], ["up-1", "above 1, underlined"], ["up-2", "× 1.05"], ["up-3", "× 1.2 and more"], ["none", "not computed"]],
    advantage: (most) => [["down-3", `−${say(most, 3)}, dotted`], ["down-1", "below 0"], ["", "0"], ["up-1", "above 0"], ["up-3", `+${say(most, 3)}, underlined`], ["none", "not trained"]],
    entropy: () => [["rare-1", "sure, below 0.1"], ["rare-2", "0.1"], ["rare-3", "0.5"], ["rare-4", "1, underlined"], ["rare-5", "2 nats and more"], ["none", "not computed"]],
    version: () => [...new Set(tokens.map((token) => token.version))].sort((a, b) => a - b).slice(0, 12).map((version) => [version % 2 ? "odd" : "even", `version ${version}`]),
  };

  const paint = () => {
    const how = chooser.value, most = largest();
    let before = null;
    for (const token of tokens) {
      token.span.className = `tk sampled ${paints[how](token, most)}${token.trained ? "" : " untrained"}${token === active ? " active" : ""}`;
      const mark = token.span.querySelector(".mark");
      if (mark) mark.remove();
      if (how === "version" && token.version !== before) {
        const made = document.createElement("span");
        made.className = "mark";
        made.textContent = `v${token.version}`;
        token.span.prepend(made);
      }
      before = token.version;
    }
    legend.replaceChildren(...legends[how](most).map(([name, text]) => {
      const made = document.createElement("span");
      made.className = `tk sampled ${name}`;
      made.textContent = text;
      return made;
    }));
  };

  const tell = (token) => {
    if (active) active.span.classList.remove("active");
    active = token;
    token.span.classList.add("active");
    const pairs = [
      ["token", JSON.stringify(token.text)], ["id", token.id], ["place", token.place],
      ["log-prob", say(token.logprob)], ["probability", token.logprob == null ? "–" : `${say(100 * Math.exp(token.logprob), 3)} %`],
      ["trainer's log-prob", say(token.trainer)], ["ratio", say(ratio(token))],
      ["advantage", (token.advantage > 0 ? "+" : "") + say(token.advantage)], ["entropy", token.entropy == null ? "–" : `${say(token.entropy)} nats`], ["return", say(token.returns)],
      ["weights", `version ${token.version}`], ["answer", token.completion], ["trained", token.trained ? "yes" : "no"],
      ...(token.left ? [["drawn from", token.left]] : []),
    ];
    const list = document.createElement("dl");
    list.className = "facts";
    for (const [name, value] of pairs) {
      const pair = document.createElement("div"), key = document.createElement("dt"), text = document.createElement("dd");
      key.textContent = name;
      text.textContent = value;
      pair.append(key, text);
      list.append(pair);
    }
    facts.replaceChildren(list);
  };

  const tokenOf = (event) => { const span = event.target.closest?.("[data-token]"); return span ? tokens[Number(span.dataset.token)] : null; };
  const focus = (place) => {
    const token = tokens[Math.min(Math.max(place, 0), tokens.length - 1)];
    if (active) active.span.tabIndex = -1;
    token.span.tabIndex = 0;
    token.span.focus();
  };
  area.addEventListener("pointerover", (event) => { const token = tokenOf(event); if (token) tell(token); });
  area.addEventListener("focusin", (event) => { const token = tokenOf(event); if (token) tell(token); });
  area.addEventListener("click", (event) => { const token = tokenOf(event); if (token) focus(tokens.indexOf(token)); });
  area.addEventListener("keydown", (event) => {
    const token = tokenOf(event);
    if (!token) return;
    const place = tokens.indexOf(token);
    const next = { ArrowRight: place + 1, ArrowLeft: place - 1, ArrowDown: place + 10, ArrowUp: place - 10, Home: 0, End: tokens.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    focus(next);
  });
  chooser.addEventListener("change", paint);

  // The two ways to show an episode are tabs; without this script both are simply there.
  let built = false;
  const buttons = [...tabs.querySelectorAll("button")];
  const choose = (button) => {
    for (const each of buttons) {
      const on = each === button;
      each.setAttribute("aria-selected", String(on));
      each.tabIndex = on ? 0 : -1;
      document.getElementById(each.getAttribute("aria-controls")).hidden = !on;
    }
    if (button.getAttribute("aria-controls") === "tokens" && !built) { built = true; build(); paint(); facts.textContent = tokens.length ? "Point at a token, or move with the arrow keys." : "Nothing was sampled here."; }
  };
  tabs.hidden = false;
  for (const button of buttons) button.addEventListener("click", () => { choose(button); history.replaceState(null, "", `#${button.getAttribute("aria-controls")}`); });
  tabs.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
    const other = buttons[1 - buttons.indexOf(document.activeElement)];
    if (other) { other.focus(); other.click(); }
  });
  document.getElementById("conversation").setAttribute("role", "tabpanel");
  section.setAttribute("role", "tabpanel");
  const asked = () => choose(location.hash === "#tokens" ? buttons[1] : buttons[0]);
  addEventListener("hashchange", asked);
  asked();
})();
