// Two runs or more can be compared.
"use strict";
(() => {
  const form = document.getElementById("runs");
  const button = form.querySelector("button");
  const update = () => { button.disabled = form.querySelectorAll("input:checked").length < 2; };
  form.addEventListener("change", update);
  update();
})();
