// Runs before the page is drawn, so that the other theme does not flash first.
"use strict";
(() => {
  const CHOICES = ["auto", "light", "dark"];
  const NAMES = { auto: "system", light: "light", dark: "dark" };
  const root = document.documentElement;

  function saved() {
    try {
      const value = localStorage.getItem("theme");
      return CHOICES.includes(value) ? value : "auto";
    } catch {
      return "auto"; // storage can be blocked; then the choice lasts as long as the page
    }
  }

  function apply(choice) {
    root.dataset.theme = choice;
    try {
      localStorage.setItem("theme", choice);
    } catch {
      // see above
    }
    document.dispatchEvent(new Event("themechange"));
  }

  root.dataset.theme = saved();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    document.dispatchEvent(new Event("themechange"));
  });
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const label = () => button.setAttribute("aria-label", `Theme: ${NAMES[root.dataset.theme]}`);
    button.addEventListener("click", () => {
      apply(CHOICES[(CHOICES.indexOf(root.dataset.theme) + 1) % CHOICES.length]);
      label();
    });
    label();
  });
})();
