// Talks to the model of `areal serve`, as any client does, and colours what it answers by the log-probs that come with it.
"use strict";
(() => {
  const { model } = JSON.parse(document.getElementById("playground-data").textContent);
  const field = (id) => document.getElementById(id);
  const said = field("said"), wrong = field("wrong"), box = field("prompt"), send = field("send"), facts = field("token-facts");
  const SECONDS = 300, ALTERNATIVES = 5;
  let messages = [], running = null;

  if (location.hash.length > 1) {  // the key stays in this page and leaves its address
    field("key").value = decodeURIComponent(location.hash.slice(1));
    history.replaceState(null, "", location.pathname);
  }
  document.querySelector(".wordmark").href = location.pathname;

  const show = (role, ...content) => {
    const made = document.createElement("article"), head = document.createElement("header"), name = document.createElement("span"), body = document.createElement("div");
    made.className = `message role-${role}`;
    name.className = "role";
    name.textContent = role;
    body.className = role === "assistant" ? "token-row" : "said";
    body.dir = "auto";
    head.append(name);
    body.append(...content);
    made.append(head, body);
    said.append(made);
    made.scrollIntoView({ block: "nearest" });
    return body;
  };
  const level = (logprob) => 1 + [0.1, 0.7, 1.6, 3].filter((edge) => -logprob >= edge).length;
  const chance = ({ token, logprob }) => `${JSON.stringify(token)} ${(100 * Math.exp(logprob)).toPrecision(3)} %`;
  const instead = (token, alternatives = []) => {
    const others = alternatives.filter((other) => other.token !== token).slice(0, ALTERNATIVES).map(chance);
    return others.length ? ` · instead of it: ${others.join(", ")}` : "";
  };
  const span = ({ token, logprob, top_logprobs }, place) => {
    const made = document.createElement("span");
    made.className = `tk sampled rare-${level(logprob)}`;
    made.textContent = token.replaceAll("\n", "↵\n");
    made.tabIndex = place ? -1 : 0;
    made.dataset.facts = `${JSON.stringify(token)} · log-prob ${logprob.toPrecision(4)} · probability ${(100 * Math.exp(logprob)).toPrecision(3)} %${instead(token, top_logprobs)}`;
    return made;
  };
  const tell = (event) => { const token = event.target.closest?.("[data-facts]"); if (token) facts.textContent = token.dataset.facts; };
  said.addEventListener("pointerover", tell);
  said.addEventListener("focusin", tell);
  said.addEventListener("click", (event) => {
    const token = event.target.closest("[data-facts]");
    if (!token) return;
    for (const other of token.parentElement.children) other.tabIndex = other === token ? 0 : -1;
    token.focus();
  });
  said.addEventListener("keydown", (event) => {
    const next = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
    const token = next && event.target.closest("[data-facts]");
    if (token && token[next]) { token.tabIndex = -1; token[next].tabIndex = 0; token[next].focus(); event.preventDefault(); }
  });

  const ask = async () => {
    const body = { model, messages, logprobs: true, top_logprobs: ALTERNATIVES + 1, temperature: Number(field("temperature").value), max_tokens: Number(field("tokens").value) };
    const answer = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json", authorization: `Bearer ${field("key").value}` },
      body: JSON.stringify(body),
      signal: AbortSignal.any([running.signal, AbortSignal.timeout(1000 * SECONDS)]),
    });
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error?.message || answer.statusText);
    return found.choices[0];
  };
  const talk = async () => {
    const text = box.value.trim();
    if (!text || running) return;
    running = new AbortController();
    send.textContent = "Stop";
    wrong.textContent = "";
    box.value = "";
    messages.push({ role: "user", content: text });
    const asked = show("user", text);
    try {
      const { message, logprobs } = await ask();
      const tokens = logprobs?.content || [];
      messages.push(message);
      show("assistant", ...(tokens.length ? tokens.map(span) : [message.content || "(nothing)"]));
    } catch (problem) {
      messages.pop();  // it may be said again
      asked.parentElement.remove();
      box.value = text;
      wrong.textContent = problem.name === "AbortError" ? "Stopped." : problem.message;
    } finally {
      running = null;
      send.textContent = "Send";
    }
  };
  field("talk").addEventListener("submit", (event) => { event.preventDefault(); if (running) running.abort(); else talk(); });
  box.addEventListener("keydown", (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); talk(); } });
  field("anew").addEventListener("click", () => { running?.abort(); messages = []; said.replaceChildren(); facts.textContent = ""; box.focus(); });
  box.focus();
})();
