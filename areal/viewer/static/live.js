// What a running run does, asked for every few seconds while somebody looks; its curves when it has taken steps.
"use strict";
(() => {
  const strip = document.getElementById("live");
  const url = strip && strip.dataset.url;
  if (!url) return;
  const every = 3000;
  let step = strip.dataset.step;

  const grow = async () => {
    const answer = await fetch(strip.dataset.figures, { signal: AbortSignal.timeout(15000) });
    if (!answer.ok) return;
    const figures = await answer.json();
    document.querySelector(".verdict").textContent = figures.verdict;
    document.dispatchEvent(new CustomEvent("areal-figures", { detail: figures }));
  };
  const look = async () => {
    const answer = await fetch(url, { signal: AbortSignal.timeout(15000) });
    if (!answer.ok) return false;
    const parsed = new DOMParser().parseFromString(await answer.text(), "text/html");
    strip.replaceChildren(...parsed.body.childNodes);
    const busy = document.querySelector("#charts:hover, #charts :focus");  // nothing moves under a hand
    if (answer.headers.get("x-run-step") !== step && !busy) {
      step = answer.headers.get("x-run-step");
      await grow();
    }
    return answer.headers.get("x-run-state") === "running";
  };
  const ask = async () => {
    let runs = true;
    if (document.visibilityState === "visible") {
      try { runs = await look(); } catch { /* it is asked again */ }
    }
    if (runs) setTimeout(ask, every);
  };
  setTimeout(ask, every);
})();
