// What a running run does, asked for every few seconds while somebody looks.
"use strict";
(() => {
  const strip = document.getElementById("live");
  const url = strip && strip.dataset.url;
  if (!url) return;
  const every = 3000;
  const ask = async () => {
    if (document.visibilityState === "visible") {
      try {
        const answer = await fetch(url, { signal: AbortSignal.timeout(15000) });
        if (!answer.ok) return;
        const parsed = new DOMParser().parseFromString(await answer.text(), "text/html");
        strip.replaceChildren(...parsed.body.childNodes);
        if (answer.headers.get("x-run-state") !== "running") return;
      } catch { /* it is asked again */ }
    }
    setTimeout(ask, every);
  };
  setTimeout(ask, every);
})();
