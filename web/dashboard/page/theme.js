// Loaded before the page is drawn, so that it does not flash in the wrong colours.
"use strict";
(() => {
  const kept = () => {
    try {
      return localStorage.getItem("kvtier-theme");
    } catch {
      return null; // the browser does not allow storage
    }
  };
  const theme = kept();
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
