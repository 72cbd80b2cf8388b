// Loaded before the page is drawn, so that it does not flash in the other colours.
"use strict";
(() => {
  const kept = () => {
    try {
      return localStorage.getItem("kvtier-theme");
    } catch {
      return null; // a browser that keeps nothing
    }
  };
  const theme = kept();
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
