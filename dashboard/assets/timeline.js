// Wheel and keys of the timeline. Without Ctrl the wheel scrolls the page, so plotly never gets it.
(() => {
  const PAUSE_MS = 60; // the notches of a wheel within it become one zoom, and one request
  const plot = () => document.querySelector("#timeline-graph .js-plotly-plot");
  const drawn = (gd, axis) => gd._fullLayout[axis].range.map((end) => gd._fullLayout[axis].r2l(end));
  let asked = null; // the ranges of a zoom that the server has been asked for, and its timer
  const ends = (gd, axis) => (asked && asked.gd === gd && asked[axis]) || drawn(gd, axis);
  const move = (gd, axis, first, last) => {
    window.Plotly.relayout(gd, { [`${axis}.range[0]`]: first, [`${axis}.range[1]`]: last });
  };
  const zoom = (gd, axis, factor, share) => {
    const [first, last] = ends(gd, axis);
    const at = first + share * (last - first);
    turn(gd, axis, at + (first - at) * factor, at + (last - at) * factor);
  };
  const pan = (gd, share, [first, last] = ends(gd, "xaxis")) => {
    if (!scale) return;
    const least = Math.min(0, -first);
    const most = Math.max(0, scale.length_ms - last);
    const by = Math.max(least, Math.min(most, share * (last - first)));
    turn(gd, "xaxis", first + by, last + by);
  };

  const within = (share) => Math.max(0, Math.min(1, share));

  // The value at a place between two that are known, or beyond the outer ones.
  const between = (at, from, to) => {
    let part = 1;
    while (part < from.length - 1 && from[part] < at) part += 1;
    const share = (at - from[part - 1]) / (from[part] - from[part - 1]);
    return to[part - 1] + share * (to[part] - to[part - 1]);
  };
  let scale = null;
  const rowOf = (line) => between(line, scale.lines, scale.rows);
  const lineOf = (row) => between(row, scale.rows, scale.lines);

  // What of the step is shown, as shares of its time and of its ranks.
  const shares = (gd) => {
    const [first, last] = ends(gd, "xaxis");
    const lines = ends(gd, "yaxis").map((at) => at + 0.5);
    return {
      x: [first / scale.length_ms, last / scale.length_ms],
      y: [Math.min(...lines), Math.max(...lines)].map((line) => rowOf(line) / scale.num_ranks),
    };
  };

  const WINDOW = ["from", "to", "rows"];
  const SELECTED = ["span", "box"];
  const NS_PER_MS = 1e6;
  // First and end row of a stretch of lines, of which each counts whole.
  const rowsOf = (lines) => [
    Math.max(Math.floor(rowOf(Math.floor(Math.min(...lines) + 1e-6))), 0),
    Math.min(Math.ceil(rowOf(Math.ceil(Math.max(...lines) - 1e-6))), scale.num_ranks),
  ];
  // The query of what the axes show, or are about to: of whole lines, or the whole step.
  const zoomed = (gd, { xaxis = ends(gd, "xaxis"), yaxis = ends(gd, "yaxis") } = {}) => {
    const query = new URLSearchParams(window.location.search);
    for (const key of [...WINDOW, "show"]) query.delete(key);
    const [first, last] = xaxis;
    const begin = Math.round(Math.max(first, 0) * NS_PER_MS);
    const end = Math.round(Math.min(last, scale.length_ms) * NS_PER_MS);
    const lines = yaxis.map((at) => at + 0.5);
    const [top, bottom] = rowsOf(lines);
    if (begin >= end || top >= bottom) return null;
    const isWhole = begin === 0 && end >= Math.round(scale.length_ms * NS_PER_MS);
    if (isWhole && top === 0 && bottom === scale.num_ranks) {
      query.set("show", "whole"); // else a step that hangs is shown until it came to a stop
    } else {
      query.set("from", begin);
      query.set("to", end);
      query.set("rows", `${top}-${bottom - 1}`);
    }
    return `?${query}`;
  };

  // The server answers sooner than plotly moves its axes. So only the canvas moves until the answer
  // comes, and the axes too if that takes long.
  const MOVE_MS = 400;
  const stretch = () => {
    const held = asked && { x: asked.xaxis, y: asked.yaxis };
    window.dash_clientside.canvas.hold("timeline-graph", held);
  };
  const forget = () => {
    if (!asked) return null;
    clearTimeout(asked.timer);
    const before = asked;
    asked = null;
    if (before.gd.isConnected) stretch();
    return before;
  };
  const ranges = ({ xaxis, yaxis }) => ({
    "xaxis.range[0]": xaxis[0], "xaxis.range[1]": xaxis[1],
    "yaxis.range[0]": yaxis[0], "yaxis.range[1]": yaxis[1],
  });
  const moveAsked = () => {
    const before = forget();
    if (!before || !before.gd.isConnected) return;
    window.Plotly.relayout(before.gd, ranges(before));
  };
  const turn = (gd, axis, first, last) => {
    const to = { xaxis: ends(gd, "xaxis"), yaxis: ends(gd, "yaxis"), [axis]: [first, last] };
    const search = scale && !scale.is_whole && zoomed(gd, to);
    if (!search || search === window.location.search) {
      moveAsked();
      move(gd, axis, first, last);
      return;
    }
    if (asked) clearTimeout(asked.timer);
    asked = { gd, search, ...to, timer: setTimeout(moveAsked, MOVE_MS) };
    askFor(search);
    stretch();
    moveAround(gd);
  };

  // A zoom belongs into the address, but each notch of a wheel is no step of the history. The
  // address is replaced first, so that Dash's Location finds it as it should be and pushes nothing.
  let loaded = null; // of a step whose spans are all there
  let sent = null; // that the server has been asked for already
  const zoomAddress = (relayout, shown) => {
    const none = [window.dash_clientside.no_update, window.dash_clientside.no_update];
    const gd = plot();
    scale = shown && shown.scale;
    const keys = Object.keys(relayout || {});
    if (!gd || !gd._fullLayout || !gd._fullLayout.xaxis || !scale) return none;
    if (!keys.some((key) => /^[xy]axis\.(range|autorange)/.test(key))) return none;
    const query = new URLSearchParams(window.location.search);
    let search;
    if (keys.some((key) => key.endsWith(".autorange"))) {
      for (const key of WINDOW) query.delete(key);
      query.set("show", "whole");
      search = `?${query}`;
      const lines = scale.lines[scale.lines.length - 1];
      if (scale.is_whole) {
        window.Plotly.relayout(gd, {
          "xaxis.range": [0, scale.length_ms], "yaxis.range": [lines - 0.5, -0.5],
        });
      }
    } else {
      search = zoomed(gd);
    }
    if (!search || search === window.location.search) return none;
    loaded = scale.is_whole ? search : null;
    window.history.replaceState(window.history.state, "", window.location.pathname + search);
    return [window.location.search, window.location.href];
  };

  // A zoom of a step whose spans are all loaded needs nothing from the server.
  const isAsked = (search) => {
    const needsNothing = Boolean(search) && (search === loaded || search === sent);
    if (!needsNothing) [loaded, sent] = [null, null];
    return needsNothing;
  };

  // A click on the name of a group folds or unfolds it. The address has numbers and ranges.
  const foldGroup = (clicked) => {
    const none = [window.dash_clientside.no_update, window.dash_clientside.no_update];
    const number = /^fold (\d+) /.exec((clicked && clicked.annotation && clicked.annotation.name) || "");
    if (!number) return none;
    const query = new URLSearchParams(window.location.search);
    const folded = new Set();
    for (const part of (query.get("fold") || "").split(",").filter(Boolean)) {
      const [first, last] = part.split("-").map(Number);
      for (let at = first; at <= (last === undefined ? first : last); at += 1) folded.add(at);
    }
    const one = Number(number[1]);
    if (!folded.delete(one)) folded.add(one);
    query.delete("fold");
    if (folded.size) query.set("fold", [...folded].sort((a, b) => a - b).join(","));
    return [`?${query}`, window.dash_clientside.no_update];
  };

  // One button folds all groups, or unfolds them; the zoom stays.
  document.addEventListener("click", (event) => {
    const button = event.target.closest("#timeline-fold");
    if (!button) return;
    const query = new URLSearchParams(window.location.search);
    query.delete("fold");
    if (button.dataset.fold) query.set("fold", button.dataset.fold);
    window.dash_clientside.set_props("url", { search: `?${query}` });
  });

  // The name of a group whose first rows are above the shown ones is beside the first of these.
  const keepNames = (gd) => {
    const [low, high] = [...drawn(gd, "yaxis")].sort((a, b) => a - b);
    const moved = {};
    (gd._fullLayout.annotations || []).forEach((one, index) => {
      const ends = /^fold -?\d+ (\S+) (\S+)$/.exec(one.name || "");
      if (!ends) return;
      const [first, end] = [Number(ends[1]), ends[2] === "inf" ? Infinity : Number(ends[2])];
      const top = low + (one.yanchor === "middle" ? Math.min(0.5, (high - low) / 2) : 0);
      const y = first < low ? Math.min(top, end - 1) : first;
      if (y !== one.y) moved[`annotations[${index}].y`] = y;
    });
    if (Object.keys(moved).length) window.Plotly.relayout(gd, moved);
  };
  // Names of groups are buttons for the keyboard and for screen readers too.
  const nameGroups = (gd) => {
    const layout = gd._fullLayout.annotations || [];
    for (const each of gd.querySelectorAll("g.annotation")) {
      const of = layout[Number(each.dataset.index)];
      if (!of || !/^fold \d/.test(of.name || "")) continue;
      const isFolded = of.text.startsWith("▸");
      each.setAttribute("tabindex", "0");
      each.setAttribute("role", "button");
      each.setAttribute("aria-expanded", isFolded ? "false" : "true");
      each.setAttribute("aria-label", of.text.replace(/^. |<\/?b>/g, ""));
      each.dataset.fold = of.name;
    }
  };

  // An address that leaves the step to the page, or names a finding, gets what is shown: opened
  // later, in a run that goes on, it shows the same. So does one that leaves run or epoch open: a
  // newer run, and a job that was started again, have the same step too.
  const keepStep = ({ search, run, epoch, step }, page) => {
    const query = new URLSearchParams(window.location.search);
    const isFinding = query.has("show") && query.get("show") !== "whole";
    if (query.has("step") && !isFinding) {
      const place = Object.entries({ run, epoch, step });
      const isOther = place.some(([key, value]) => query.has(key) && query.get(key) !== `${value}`);
      if (isOther || place.every(([key]) => query.has(key))) return; // of the page before; complete
      for (const [key, value] of place) query.set(key, value);
      replaceSearch(`?${query}`);
    } else if (search) {
      if (isFinding) askFor(search);
      else replaceSearch(search);
    } else if (!isFinding && page && page.asked === window.location.pathname + window.location.search) {
      // Chosen while the records were read: the page asks for it by name since.
      if (step === null || [run, epoch, step].join() !== [page.run, page.epoch, page.step].join()) return;
      for (const [key, value] of Object.entries({ run, epoch: epoch || 0, step })) query.set(key, value);
      replaceSearch(`?${query}`);
    }
  };
  // The request leaves at once, and not after the callbacks of a new address.
  const askFor = (search) => {
    replaceSearch(search);
    window.dash_clientside.set_props("page-asked", { data: window.location.pathname + search });
  };
  const replaceSearch = (search) => {
    if (search === window.location.search) return;
    window.history.replaceState(window.history.state, "", window.location.pathname + search);
    sent = search; // the server has been asked for it already, or need not be
    setTimeout(() => {
      const { search: now, href } = window.location;
      window.dash_clientside.set_props("url", { search: now, href });
    });
  };

  // The search is in the address too: it is read once, when the page is opened.
  const keepFound = () => {
    const input = document.getElementById("timeline-search");
    if (!input || input.dataset.isRead) return;
    input.dataset.isRead = "yes";
    const value = new URLSearchParams(window.location.search).get("find");
    if (value && !input.value) window.dash_clientside.set_props("timeline-search", { value });
  };
  // What is selected is in the address: a span, a box, or else what is searched for.
  const select = (changes) => {
    const query = new URLSearchParams(window.location.search);
    for (const key of SELECTED) query.delete(key);
    for (const [key, value] of Object.entries(changes)) {
      if (value) query.set(key, value);
      else query.delete(key);
    }
    askFor(`?${query}`);
  };
  document.addEventListener("change", ({ target }) => {
    if (target.id === "timeline-search") select({ find: target.value });
  });
  const selectSpan = (rank, kind, ms) => {
    isSeen = true;
    select({ span: `${rank},${kind},${Math.round(ms * NS_PER_MS)}` });
  };
  const selectBox = (selected) => {
    const gd = plot();
    if (!selected || !selected.range || !gd || !scale) return;
    const [begin, end] = [...selected.range.x].sort((a, b) => a - b);
    const [first, last] = rowsOf(selected.range.y.map((at) => at + 0.5));
    if (first >= last) return;
    const ns = [Math.max(begin, 0), end].map((ms) => Math.round(ms * NS_PER_MS));
    window.Plotly.relayout(gd, { selections: [] }); // the server draws it, from the address
    select({ box: `${ns.join("-")},${first}-${last - 1}` });
  };
  const close = () => {
    const query = new URLSearchParams(window.location.search);
    if (SELECTED.some((key) => query.has(key))) {
      select({});
    } else if (query.has("find")) {
      window.dash_clientside.set_props("timeline-search", { value: "" });
      select({ find: "" });
    }
  };
  document.addEventListener("click", ({ target }) => {
    if (target.closest("#timeline-deselect")) close();
  });

  // The row of what is searched for is brought onto the screen, by a zoom if need be.
  let sought = null; // the line, until the figure with it is drawn
  let isSeen = false; // what is selected by a click is on the screen
  let jumped = ""; // what was found last, of a figure that is drawn anew too
  const jump = () => {
    const found = document.querySelector("#timeline-selection :is([data-line], [data-search])");
    const { line, search } = found ? found.dataset : {};
    const target = [new URLSearchParams(window.location.search).get("find"), line, search].join();
    if (target === jumped) return;
    jumped = target;
    if (isSeen) {
      isSeen = false;
      return;
    }
    if (line !== undefined) sought = Number(line);
    if (search) askFor(search);
  };
  const scrollToSought = (gd) => {
    if (sought === null || !gd._fullLayout || !gd._fullLayout.yaxis) return;
    const { yaxis } = gd._fullLayout;
    const at = gd.getBoundingClientRect().top + yaxis._offset + yaxis.d2p(sought);
    sought = null;
    const covered = document.querySelector(".header").getBoundingClientRect().bottom;
    if (at > covered + 40 && at < window.innerHeight - 40) return;
    window.scrollBy({ top: at - (covered + window.innerHeight) / 2 });
  };

  // The usual step beneath and the window in the minimap follow the time that is shown.
  const follow = (relayout, figure, shown, page) => {
    scale = shown && shown.scale;
    if (shown) {
      keepStep(shown, page);
      keepFound();
    }
    const gd = plot();
    if (!gd || !gd._fullLayout || !gd._fullLayout.xaxis || !scale) return;
    jump();
    if (!gd.dataset.named) {
      gd.dataset.named = "yes";
      scrollToSought(gd);
      gd.on("plotly_afterplot", () => {
        keepNames(gd);
        nameGroups(gd);
        scrollToSought(gd);
      });
    }
    keepNames(gd);
    nameGroups(gd);
    if (asked && shown.asked === asked.search) forget();
    // The height that was reserved until plotly was there; folded groups need less.
    const reserved = gd.closest("[style*='min-height']");
    if (reserved) reserved.style.minHeight = `${gd._fullLayout.height}px`;
    const isMeasuring = gd._fullLayout.dragmode === "select";
    document.getElementById("timeline-measure")?.setAttribute("aria-pressed", isMeasuring);
    moveAround(gd);
  };
  const moveAround = (gd) => {
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

  // Run and minimap are drawn anew with another step, order or revision, and not at each zoom.
  const around = (shown, drawn) => {
    if (!shown || !shown.scale) return window.dash_clientside.no_update;
    const order = new URLSearchParams(window.location.search).get("order");
    const now = JSON.stringify([shown.run, shown.epoch, shown.step, shown.revisions, order]);
    return now === drawn ? window.dash_clientside.no_update : now;
  };

  // A click on a step of the run, or on a point with the query of what it is.
  const openPoint = (clicked) => {
    const point = clicked && clicked.points && clicked.points[0];
    if (!point) return window.dash_clientside.no_update;
    if (point.customdata) return point.customdata;
    const query = new URLSearchParams(window.location.search);
    for (const key of [...WINDOW, ...SELECTED, "show", "epoch"]) query.delete(key);
    query.set("step", Math.round(point.x));
    return `?${query}`;
  };

  // A choice of the reader. With each picture the chooser is made anew, and has the shown step.
  const chooseStep = (chosen, shown) => {
    if (!chosen || !shown || chosen === String(shown.step)) return window.dash_clientside.no_update;
    const query = new URLSearchParams(window.location.search);
    for (const key of [...WINDOW, ...SELECTED, "show"]) query.delete(key);
    if (shown.run) query.set("run", shown.run);
    query.set("step", chosen);
    return `?${query}`;
  };

  // The file for Perfetto has what is shown now: the address knows the zoom, the link does not.
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a.perfetto");
    if (!link) return;
    const [path, made] = link.getAttribute("href").split("?");
    const query = new URLSearchParams(made);
    const now = new URLSearchParams(window.location.search);
    for (const key of WINDOW) {
      query.delete(key);
      if (now.has(key)) query.set(key, now.get(key));
    }
    if (link.dataset.what === "window") query.delete("rank");
    link.setAttribute("href", `${path}?${query}`);
  }, true);

  window.dash_clientside = window.dash_clientside || {};
  window.dash_clientside.timeline = {
    follow, openPoint, chooseStep, zoomAddress, isAsked, foldGroup, around, selectSpan, selectBox,
    jump,
  };

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
    const rows = y.map((share) => lineOf(share * scale.num_ranks) - 0.5);
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
  document.addEventListener("pointerdown", moveAsked, { capture: true }); // plotly drags what it drew
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

  // A finger that moves up or down scrolls the page, and pans if it moves sideways. Plotly would
  // take both, and the rows fill the screen of a phone.
  let finger = null;
  const panned = (event) => {
    const gd = plot();
    const isPan = gd && gd._fullLayout && gd._fullLayout.dragmode === "pan";
    return isPan && event.target.closest("#timeline-graph .nsewdrag") ? gd : null;
  };
  document.addEventListener("touchstart", (event) => {
    if (panned(event)) event.stopImmediatePropagation();
  }, { capture: true, passive: true });
  document.addEventListener("pointerdown", (event) => {
    const gd = event.pointerType === "touch" && event.isPrimary && panned(event);
    finger = gd ? { gd, x: event.clientX, range: ends(gd, "xaxis") } : null;
  });
  document.addEventListener("pointermove", (event) => {
    if (!finger || !event.isPrimary) return;
    const { gd, x, range } = finger;
    if (gd.isConnected) pan(gd, (x - event.clientX) / gd._fullLayout.xaxis._length, range);
  });
  for (const kind of ["pointerup", "pointercancel"]) {
    document.addEventListener(kind, () => {
      finger = null;
    });
  }

  // The first notch zooms at once, and those within a pause after it become one zoom.
  let wheeled = null;
  let isPausing = false;
  const zoomWheeled = () => {
    isPausing = Boolean(wheeled);
    if (!wheeled) return;
    const { gd, axis, factor, share } = wheeled;
    wheeled = null;
    setTimeout(zoomWheeled, PAUSE_MS);
    if (gd.isConnected) zoom(gd, axis, factor, share);
  };
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
    wheeled = { gd, axis, factor, share };
    if (!isPausing) zoomWheeled();
  }, { capture: true, passive: false });

  const selected = (gd) => {
    moveAsked();
    const panel = document.querySelector("#timeline-selection [data-begin-ms]");
    if (!panel) return;
    const [begin, end] = [Number(panel.dataset.beginMs), Number(panel.dataset.endMs)];
    move(gd, "xaxis", begin - 0.1 * (end - begin), end + 0.1 * (end - begin));
  };
  const measure = (gd) => {
    moveAsked();
    const isOn = gd._fullLayout.dragmode === "select";
    window.Plotly.relayout(gd, { dragmode: isOn ? "pan" : "select" });
    document.getElementById("timeline-measure")?.setAttribute("aria-pressed", !isOn);
  };
  document.addEventListener("click", (event) => {
    if (event.target.closest("#timeline-measure") && plot()) measure(plot());
  });
  const keys = {
    w: (gd) => zoom(gd, "xaxis", 0.6, 0.5),
    s: (gd) => zoom(gd, "xaxis", 1 / 0.6, 0.5),
    a: (gd) => pan(gd, -0.2),
    d: (gd) => pan(gd, 0.2),
    arrowleft: (gd) => pan(gd, -0.2),
    arrowright: (gd) => pan(gd, 0.2),
    f: selected,
    0: (gd) => {
      forget();
      window.Plotly.relayout(gd, { "xaxis.autorange": true });
    },
    m: (gd) => measure(gd),
    g: () => document.getElementById("timeline-fold")?.click(),
    c: () => document.getElementById("timeline-path")?.click(),
    i: () => document.getElementById("timeline-ideal")?.click(),
    "/": () => document.getElementById("timeline-search")?.focus(),
    escape: close,
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
  document.addEventListener("keydown", (event) => {
    const group = event.target.closest && event.target.closest("g.annotation[data-fold]");
    if (!group || (event.key !== "Enter" && event.key !== " ")) return;
    event.preventDefault();
    const [search] = foldGroup({ annotation: { name: group.dataset.fold } });
    window.dash_clientside.set_props("url", { search });
  });
  // A menu closes when the pointer or the keyboard leaves it.
  for (const kind of ["click", "focusin"]) {
    document.addEventListener(kind, (event) => {
      for (const one of document.querySelectorAll("details.drop-down[open]")) {
        if (!one.contains(event.target)) one.removeAttribute("open");
      }
    });
  }
})();
