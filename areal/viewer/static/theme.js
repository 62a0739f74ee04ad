// Light, dark, or as the system has it; remembered by this browser. Runs before the page is drawn.
"use strict";
(() => {
  const root = document.documentElement;
  const order = ["", "light", "dark"];
  let chosen = "";
  try { chosen = localStorage.getItem("areal-theme") || ""; } catch { /* a browser that keeps nothing */ }
  if (!order.includes(chosen)) chosen = "";
  const show = () => {
    if (chosen) root.dataset.theme = chosen; else delete root.dataset.theme;
    const button = document.getElementById("theme");
    if (button) {
      button.textContent = `Theme: ${chosen || "auto"}`;
    }
  };
  show();
  const changed = () => document.dispatchEvent(new Event("areal-theme"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  document.addEventListener("DOMContentLoaded", () => {
    show();
    document.getElementById("theme").addEventListener("click", () => {
      chosen = order[(order.indexOf(chosen) + 1) % order.length];
      try { localStorage.setItem("areal-theme", chosen); } catch { /* the same */ }
      show();
      changed();
    });
  });
})();
