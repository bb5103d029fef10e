// A button in the row of an alert acknowledges or silences it; the server checks who may.
let numChanges = 0;
document.addEventListener("click", ({ target }) => {
  const button = target.closest("button[data-alert]");
  if (!button) return;
  const { alert, hours } = button.dataset;
  numChanges += 1;
  window.dash_clientside.set_props("alerts-change", { data: { alert, hours, number: numChanges } });
  button.closest("details")?.removeAttribute("open");
});
