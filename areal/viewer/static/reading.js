// From episode to episode in the order of the table that one came from: j to the next, k to the one before, u back.
"use strict";
(() => {
  let list = null;
  try { list = JSON.parse(sessionStorage.getItem("areal-list")); } catch { /* a browser that keeps nothing */ }
  const here = list ? list.pages.indexOf(location.pathname) : -1;
  if (here < 0) return;

  const places = { j: list.pages[here + 1], k: list.pages[here - 1], u: list.back };
  const link = (key, text) => {
    const made = document.createElement("a");
    const mark = document.createElement("kbd");
    mark.textContent = key;
    made.append(mark, ` ${text}`);
    made.href = places[key] + (key === "u" ? "" : location.hash);
    return made;
  };
  const way = document.createElement("nav");
  way.className = "reading note";
  way.setAttribute("aria-label", "Episodes of the table");
  const count = document.createElement("span");
  count.textContent = `${(here + 1).toLocaleString("en")} of ${list.count.toLocaleString("en")}`;
  if (places.k) way.append(link("k", "before"));
  way.append(count);
  if (places.j) way.append(link("j", "next"));
  way.append(link("u", "table"));
  document.querySelector(".heading").append(way);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
    if (Object.hasOwn(places, event.key) && places[event.key]) location.href = places[event.key] + (event.key === "u" ? "" : location.hash);
  });
})();
