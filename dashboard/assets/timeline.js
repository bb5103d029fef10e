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

  const within = (share) => Math.max(0, Math.min(1, share));

  // What of the step is shown, as shares of its time and of its ranks.
  let scale = null;
  const shares = (gd) => {
    const [first, last] = ends(gd, "xaxis");
    const rows = ends(gd, "yaxis").map((at) => scale.first_row + (at + 0.5) * scale.ranks_per_line);
    const [top, bottom] = [Math.min(...rows), Math.max(...rows)];
    return {
      x: [first / scale.length_ms, last / scale.length_ms],
      y: [top / scale.num_ranks, bottom / scale.num_ranks],
    };
  };

  // The ideal step beneath and the window in the minimap follow the time that is shown.
  const follow = (relayout, figure, shown) => {
    scale = shown && shown.scale;
    const gd = plot();
    if (!gd || !gd._fullLayout || !gd._fullLayout.xaxis || !scale) return;
    const frame = document.getElementById("timeline-window");
    if (frame) {
      const { x, y } = shares(gd);
      frame.style.left = `${100 * within(x[0])}%`;
      frame.style.width = `${100 * (within(x[1]) - within(x[0]))}%`;
      frame.style.top = `${100 * within(y[0])}%`;
      frame.style.height = `${100 * (within(y[1]) - within(y[0]))}%`;
    }
    const ideal = document.querySelector("#timeline-ideal-graph .js-plotly-plot");
    if (!ideal || !ideal._fullLayout || !ideal._fullLayout.xaxis) return;
    const [first, last] = ends(gd, "xaxis");
    const [now, end] = ends(ideal, "xaxis");
    if (Math.abs(now - first) + Math.abs(end - last) > 1e-9 * (last - first)) {
      move(ideal, "xaxis", first, last);
    }
  };

  // A click on a step of the run, or on the lane of a finding, whose point has the query.
  const openStep = (clicked) => {
    const point = clicked && clicked.points && clicked.points[0];
    if (!point) return window.dash_clientside.no_update;
    if (point.customdata) return point.customdata;
    const query = new URLSearchParams(window.location.search);
    for (const key of ["from", "to", "rows", "show", "epoch"]) query.delete(key);
    query.set("step", Math.round(point.x));
    return `?${query}`;
  };

  // The file for Perfetto has what is shown now: the address knows the zoom, the link does not.
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a.perfetto");
    if (!link) return;
    const [path, made] = link.getAttribute("href").split("?");
    const query = new URLSearchParams(made);
    const now = new URLSearchParams(window.location.search);
    for (const key of ["from", "to", "rows"]) {
      query.delete(key);
      if (now.has(key)) query.set(key, now.get(key));
    }
    if (link.dataset.what === "window") query.delete("rank");
    link.setAttribute("href", `${path}?${query}`);
  }, true);

  window.dash_clientside = window.dash_clientside || {};
  window.dash_clientside.timeline = { follow, openStep };

  // A drag on the minimap moves the window; where all is shown, it chooses one.
  let dragged = null;
  const at = (event) => {
    const box = document.getElementById("timeline-minimap").getBoundingClientRect();
    return {
      x: within((event.clientX - box.left) / box.width),
      y: within((event.clientY - box.top) / box.height),
    };
  };
  const show = (gd, x, y) => {
    const rows = y.map((share) => (share * scale.num_ranks - scale.first_row) / scale.ranks_per_line - 0.5);
    window.Plotly.relayout(gd, {
      "xaxis.range[0]": x[0] * scale.length_ms,
      "xaxis.range[1]": x[1] * scale.length_ms,
      ...(y.length ? { "yaxis.range[0]": rows[1], "yaxis.range[1]": rows[0] } : {}),
    });
  };
  const center = (range, share) => {
    const size = range[1] - range[0];
    const first = Math.max(0, Math.min(1 - size, share - size / 2));
    return [first, first + size];
  };
  document.addEventListener("pointerdown", (event) => {
    const gd = plot();
    if (!event.target.closest("#timeline-minimap") || !gd || !gd._fullLayout || !scale) return;
    event.preventDefault();
    const { x, y } = shares(gd);
    const isWhole = within(x[1]) - within(x[0]) > 0.98;
    dragged = { start: at(event), x, y, isWhole, last: at(event) };
  });
  document.addEventListener("pointermove", (event) => {
    if (!dragged) return;
    dragged.last = at(event);
    if (!dragged.isWhole) return;
    const frame = document.getElementById("timeline-window");
    const [first, last] = [dragged.start.x, dragged.last.x].sort((a, b) => a - b);
    frame.style.left = `${100 * first}%`;
    frame.style.width = `${100 * (last - first)}%`;
  });
  document.addEventListener("pointerup", () => {
    const gd = plot();
    if (!dragged || !gd) return;
    const { start, last, x, y, isWhole } = dragged;
    dragged = null;
    const chosen = [start.x, last.x].sort((a, b) => a - b);
    if (isWhole) {
      const isClick = chosen[1] - chosen[0] < 0.005;
      show(gd, isClick ? center([0, 0.1], start.x) : chosen, []);
    } else {
      const isTall = y[1] - y[0] > 0.98;
      show(gd, center(x, last.x), isTall ? [] : center(y, last.y));
    }
  });

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
    c: () => document.getElementById("timeline-path")?.click(),
    i: () => document.getElementById("timeline-ideal")?.click(),
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
