// Applies the chosen theme before the first paint; without a choice the system decides.
const chosen = localStorage.getItem("tickwheel-theme");
if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
