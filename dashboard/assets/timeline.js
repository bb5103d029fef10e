// Wheel and keys of the timeline. Without Ctrl the wheel scrolls the page, so plotly never gets it.
(() => {
  const PAUSE_MS = 60; // several notches of a wheel become one zoom, and one request
  const plot = () => document.querySelector("#timeline-graph .js-plotly-plot");
  const ends = (gd, axis) => gd._fullLayout[axis].range.map((end) => gd._fullLayout[axis].r2l(end));
  const move = (gd, axis, first, last) => {
    window.Plotly.relayout(gd, { [`${axis}.range[0]`]: first, [`${axis}.range[1]`]: last });
  };
  const zoom = (gd, axis, factor, share) => {
    const [first, last] = ends(gd, axis);
    const at = first + share * (last - first);
    move(gd, axis, at + (first - at) * factor, at + (last - at) * factor);
  };
  const pan = (gd, axis, share) => {
    const [first, last] = ends(gd, axis);
    move(gd, axis, first + share * (last - first), last + share * (last - first));
  };

  let wheeled = null;
  document.addEventListener("wheel", (event) => {
    const gd = plot();
    if (!gd || !gd._fullLayout || !gd.contains(event.target)) return;
    event.stopImmediatePropagation();
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const axis = event.shiftKey ? "yaxis" : "xaxis";
    const box = gd.querySelector(".nsewdrag").getBoundingClientRect();
    const share = event.shiftKey
      ? (box.bottom - event.clientY) / box.height
      : (event.clientX - box.left) / box.width;
    const delta = Math.max(-120, Math.min(120, event.deltaY || event.deltaX));
    const factor = Math.exp(delta / 240);
    if (wheeled && wheeled.axis === axis) {
      wheeled.factor *= factor;
      return;
    }
    wheeled = { axis, factor, share };
    setTimeout(() => {
      zoom(gd, wheeled.axis, wheeled.factor, wheeled.share);
      wheeled = null;
    }, PAUSE_MS);
  }, { capture: true, passive: false });

  const selected = (gd) => {
    const panel = document.querySelector("#timeline-selection [data-begin-ms]");
    if (!panel) return;
    const [begin, end] = [Number(panel.dataset.beginMs), Number(panel.dataset.endMs)];
    move(gd, "xaxis", begin - 0.1 * (end - begin), end + 0.1 * (end - begin));
  };
  const keys = {
    w: (gd) => zoom(gd, "xaxis", 0.6, 0.5),
    s: (gd) => zoom(gd, "xaxis", 1 / 0.6, 0.5),
    a: (gd) => pan(gd, "xaxis", -0.2),
    d: (gd) => pan(gd, "xaxis", 0.2),
    arrowleft: (gd) => pan(gd, "xaxis", -0.2),
    arrowright: (gd) => pan(gd, "xaxis", 0.2),
    f: selected,
    0: (gd) => window.Plotly.relayout(gd, { "xaxis.autorange": true }),
    "/": () => document.getElementById("timeline-search")?.focus(),
    "?": () => document.getElementById("timeline-keys")?.toggleAttribute("open"),
  };
  document.addEventListener("keydown", (event) => {
    const gd = plot();
    const act = keys[event.key.toLowerCase()];
    if (!gd || !gd._fullLayout || !act || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, textarea, select, [contenteditable], [role=listbox]")) return;
    event.preventDefault();
    act(gd);
  });
})();
