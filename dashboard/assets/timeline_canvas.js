// Draws the spans of a step on a canvas beneath plotly's axes, and their legend, and says what is
// under the pointer.
// Plotly makes an element for each bar: 2,500 take half a second. Here 8,000 take 2 ms.
(() => {
  const MAX_PIXELS = 8e6; // of a canvas; of more rows, only those near the screen are painted
  const SPARE_PX = 400; // beyond the screen, for a scroll
  const NEAR_PX = 2; // around a bar that is thinner than a pointer
  const drawings = new Map(); // by part
  let numDrawings = 0;
  const hidden = new Set(); // kinds, by the legend
  const numDrawn = new WeakMap(); // pictures that a canvas has shown

  const unpack = (Type, packed) => {
    const text = atob(packed);
    const bytes = new Uint8Array(text.length);
    for (let at = 0; at < text.length; at += 1) bytes[at] = text.charCodeAt(at);
    return new Type(bytes.buffer);
  };
  const barsOf = (one) => {
    const bars = { ...one, spans: unpack(Int32Array, one.spans) };
    for (const key of ["begin", "length", "center", "height"]) {
      bars[key] = unpack(Float64Array, one[key]);
    }
    return bars;
  };
  const canvasOf = (part) => document.getElementById(`${part}-canvas`);
  const plotOf = (part) => {
    const gd = document.querySelector(`#${part} .js-plotly-plot`);
    return gd && gd._fullLayout && gd._fullLayout.xaxis && gd._fullLayout._size ? gd : null;
  };

  // Where the rows are, in pixels, and what they show: as plotly has drawn the axes, or as the
  // server says as long as plotly has not drawn its newest figure.
  const viewOf = (drawing) => {
    const { shown, held } = drawing;
    const gd = plotOf(shown.part);
    const { l, r, t, b } = shown.margin;
    const view = { l, t, x: shown.x, y: shown.y, height: shown.height };
    view.w = canvasOf(shown.part).parentElement.clientWidth - l - r;
    view.h = shown.height - t - b;
    if (gd && gd.layout.uirevision === shown.key) {
      const { _size: size, xaxis, yaxis } = gd._fullLayout;
      Object.assign(view, { l: size.l, t: size.t, w: size.w, h: size.h });
      [view.x, view.y] = [xaxis.range.map(Number), yaxis.range.map(Number)];
      view.isPlotted = true;
    }
    if (held) [view.x, view.y] = [held.x, held.y];
    view.perMs = view.w / (view.x[1] - view.x[0]);
    view.perLine = view.h / (view.y[0] - view.y[1]);
    view.left = (ms) => view.l + (ms - view.x[0]) * view.perMs;
    view.top = (line) => view.t + (line - view.y[1]) * view.perLine;
    return view;
  };
  // A kind's colour in this theme. That of a wait may be pale.
  const toned = (kind, color) => {
    const wait = kind === "wait" && getComputedStyle(document.documentElement).getPropertyValue("--wait");
    const [, alpha = 1] = color.match(/^rgba\(.*,([\d.]+)\)$/) || [];
    return wait ? wait.trim() + Math.round(alpha * 255).toString(16).padStart(2, "0") : color;
  };
  const hatching = (context, color) => {
    const tile = document.createElement("canvas");
    [tile.width, tile.height] = [6, 6];
    const inside = tile.getContext("2d");
    inside.strokeStyle = color;
    inside.lineWidth = 1.2;
    for (const from of [-6, 0, 6]) {
      inside.moveTo(from, 6);
      inside.lineTo(from + 6, 0);
    }
    inside.stroke();
    return context.createPattern(tile, "repeat");
  };
  const paintBars = (context, bars, view) => {
    const isHatched = bars.look === "hatched";
    const color = toned(bars.kind, bars.color);
    const fills = isHatched ? [color, hatching(context, color)] : [color];
    const [first, last] = [view.from, view.to];
    for (let at = 0; at < bars.begin.length; at += 1) {
      const left = Math.max(view.left(bars.begin[at]), view.l - 2);
      const right = Math.min(view.left(bars.begin[at] + bars.length[at]), view.l + view.w + 2);
      const size = bars.height[at] * view.perLine;
      const top = Math.round(view.top(bars.center[at]) - size / 2);
      const height = Math.max(1, Math.round(size));
      if (right < view.l || left > view.l + view.w || top + height < first || top > last) continue;
      const width = Math.max(1, right - left);
      const isThin = isHatched && width <= 3;
      if (isHatched) context.clearRect(left, top, width, height); // not the work around a wait
      for (const [number, fill] of (isThin ? [color] : fills).entries()) {
        context.globalAlpha = isThin ? 0.4 : isHatched && number === 0 ? 0.22 : 1;
        context.fillStyle = fill;
        context.fillRect(left, top, width, height);
      }
      if (isHatched && !isThin) {
        context.strokeStyle = color;
        context.strokeRect(left + 0.5, top + 0.5, width - 1, height - 1);
      }
    }
    context.globalAlpha = 1;
  };

  // Each cell of a picture is a pixel of an image, which is drawn at the size of the rows.
  const imageOf = (cells) => {
    const key = [...hidden, toned("wait", "#")].join();
    if (cells.image && cells.key === key) return cells.image;
    const image = document.createElement("canvas");
    [image.width, image.height] = [cells.num_bins, cells.num_lines];
    const context = image.getContext("2d", { willReadFrequently: true });
    const colors = new Uint32Array(cells.colors.length);
    for (const [shade, color] of cells.colors.entries()) {
      if (shade && hidden.has(cells.kinds[(shade - 1) >> 1])) continue;
      context.clearRect(0, 0, 1, 1);
      context.fillStyle = toned(cells.kinds[(shade - 1) >> 1], color);
      context.fillRect(0, 0, 1, 1);
      [colors[shade]] = new Uint32Array(context.getImageData(0, 0, 1, 1).data.buffer);
    }
    const pixels = new ImageData(cells.num_bins, cells.num_lines);
    const words = new Uint32Array(pixels.data.buffer);
    for (let at = 0; at < words.length; at += 1) words[at] = colors[cells.shades[at]];
    context.putImageData(pixels, 0, 0);
    [cells.image, cells.key] = [image, key];
    return image;
  };

  const render = (context, drawing, view) => {
    context.save();
    context.beginPath();
    context.rect(view.l, view.t, view.w, view.h);
    context.clip();
    context.lineWidth = 1;
    for (const bars of drawing.bars) if (!hidden.has(bars.kind)) paintBars(context, bars, view);
    if (drawing.cells) {
      const [begin, end] = drawing.cells.ends;
      const { num_lines: lines } = drawing.cells;
      context.imageSmoothingEnabled = false;
      const image = imageOf(drawing.cells);
      const [left, top] = [view.left(begin), view.top(-0.5)];
      context.drawImage(image, left, top, (end - begin) * view.perMs, lines * view.perLine);
    }
    context.restore();
  };

  const paint = (drawing) => {
    const canvas = canvasOf(drawing.shown.part);
    const around = canvas && canvas.parentElement;
    if (!around || !around.clientWidth) return;
    const view = viewOf(drawing);
    const ratio = window.devicePixelRatio || 1;
    [view.from, view.to] = [0, view.height];
    if (around.clientWidth * view.height * ratio ** 2 > MAX_PIXELS) {
      const above = around.getBoundingClientRect().top;
      const within = (at) => Math.round(Math.min(Math.max(at, 0), view.height));
      view.from = within(-above - SPARE_PX);
      view.to = within(window.innerHeight - above + SPARE_PX);
    }
    drawing.painted = view;
    const width = Math.round(around.clientWidth * ratio);
    const height = Math.round(Math.max(view.to - view.from, 1) * ratio);
    if (canvas.width !== width || canvas.height !== height) {
      [canvas.width, canvas.height] = [width, height];
      canvas.style.width = `${width / ratio}px`;
      canvas.style.height = `${height / ratio}px`;
    }
    canvas.style.top = `${view.from}px`;
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, -view.from * ratio);
    context.clearRect(0, view.from, around.clientWidth, view.to - view.from);
    render(context, drawing, view);
    if (drawing.isNew) numDrawn.set(canvas, (numDrawn.get(canvas) || 0) + 1);
    drawing.isNew = false;
    canvas.dataset.drawn = numDrawn.get(canvas);
    if (view.isPlotted) canvas.dataset.plotted = numDrawn.get(canvas); // with its axes
  };

  // Plotly comes later than the first picture, and moves its axes by itself.
  const hooked = new WeakSet();
  const hook = (part) => {
    const [canvas, gd] = [canvasOf(part), plotOf(part)];
    if (!canvas || !document.getElementById(part)) return;
    if (!gd) {
      requestAnimationFrame(() => hook(part));
      return;
    }
    if (hooked.has(gd)) return;
    hooked.add(gd);
    const again = () => drawings.has(part) && paint(drawings.get(part));
    gd.on("plotly_afterplot", again);
    gd.on("plotly_relayouting", again);
    again();
  };
  const draw = (shown) => {
    if (!shown) return true; // hidden
    const { held } = drawings.get(shown.part) || {};
    const cells = shown.cells && { ...shown.cells, shades: unpack(Uint8Array, shown.cells.shades) };
    const bars = (shown.bars || []).map(barsOf);
    const drawing = { shown, bars, cells, held, isNew: true, number: numDrawings += 1 };
    drawing.texts = shown.texts;
    if (shown.legend) showLegend(shown.legend);
    drawings.set(shown.part, drawing);
    paint(drawing);
    hook(shown.part);
    return false;
  };

  // What is asked for is shown of what is there, until the answer comes.
  const hold = (part, held) => {
    const drawing = drawings.get(part);
    if (!drawing || (!held && !drawing.held)) return;
    drawing.held = held;
    paint(drawing);
  };
  const repaint = () => {
    for (const [part, drawing] of drawings) if (canvasOf(part)) paint(drawing);
  };
  window.addEventListener("resize", repaint);
  new MutationObserver(repaint).observe(document.documentElement, { attributeFilter: ["data-mantine-color-scheme"] });
  window.addEventListener("scroll", () => {
    for (const [part, { painted }] of drawings) {
      const canvas = canvasOf(part);
      if (!canvas || !painted) continue;
      const above = canvas.parentElement.getBoundingClientRect().top;
      const [from, to] = [Math.max(-above, 0), Math.min(window.innerHeight - above, painted.height)];
      if (from < to && (from < painted.from || to > painted.to)) paint(drawings.get(part));
    }
  }, { capture: true, passive: true });

  // The legend, whose lines plotly would not fill. A click on a kind hides or shows it, a double
  // click shows it alone, or all.
  const press = (key) => {
    key.setAttribute("aria-pressed", !hidden.has(key.dataset.kind));
  };
  const showLegend = (entries) => {
    const place = document.getElementById("timeline-legend");
    const names = entries.map((one) => one.name).join();
    if (!place || place.dataset.names === names) return;
    place.dataset.names = names;
    place.replaceChildren(...entries.map(({ name, legendgroup: kind, marker, line }) => {
      const key = document.createElement(kind ? "button" : "span");
      const sign = document.createElement("i");
      sign.className = line ? "line" : marker.pattern ? "hatched" : "";
      if (!marker || !marker.pattern) sign.style.background = (line || marker).color;
      key.className = "key";
      key.append(sign, name);
      if (kind) {
        key.dataset.kind = kind;
        key.title = "Hide or show; double click: alone, or all";
        press(key);
      }
      return key;
    }));
  };
  for (const [event, isDouble] of [["click", false], ["dblclick", true]]) {
    document.addEventListener(event, ({ target }) => {
      const key = target.closest("#timeline-legend button");
      if (!key) return;
      const keys = [...key.parentElement.querySelectorAll("button")];
      const { kind } = key.dataset;
      const others = keys.map((one) => one.dataset.kind).filter((one) => one !== kind);
      const isAlone = others.every((one) => hidden.has(one));
      if (!isDouble && !hidden.delete(kind)) hidden.add(kind);
      if (isDouble) {
        hidden.delete(kind);
        for (const one of others) hidden[isAlone ? "delete" : "add"](one);
      }
      keys.forEach(press);
      repaint();
    });
  }

  // A saved picture has the whole plot, as an image beneath plotly's axes.
  const images = (gd) => {
    const part = [...drawings.keys()].find((one) => plotOf(one) === gd);
    if (!part) return [];
    const view = viewOf(drawings.get(part));
    const [canvas, scale] = [document.createElement("canvas"), 2];
    [canvas.width, canvas.height] = [view.w * scale, view.h * scale];
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, -view.l * scale, -view.t * scale);
    render(context, drawings.get(part), { ...view, from: 0, to: view.height });
    return [{
      source: canvas.toDataURL(), xref: "paper", yref: "paper", x: 0, y: 1, sizex: 1, sizey: 1,
      sizing: "stretch", layer: "below",
    }];
  };

  // Its traces: plotly's, and those of a legend.
  const traces = (gd) => {
    const of = [...drawings.values()].find(({ shown }) => plotOf(shown.part) === gd);
    const keys = ((of && of.shown.legend) || []).filter((one) => one.type);
    return [...gd.data, ...keys].filter((one) => !hidden.has(one.legendgroup));
  };

  // The texts of spans are asked for when the pointer is on one for the first time.
  const describeSpan = (drawing, span) => {
    if (drawing.texts) return drawing.texts[span] || "";
    drawing.texts = [];
    const { part } = drawing.shown;
    window.dash_clientside.set_props(`${part}-pointed`, { data: drawing.number });
    return "";
  };
  const describe = (found) => {
    const drawing = [...drawings.values()].find((one) => found && one.number === found.picture);
    if (!drawing) return;
    drawing.texts = found.texts;
    if (pointed) showTip(pointed);
  };

  // The bar at a place in pixels of the figure: the shortest of those there, drawn last.
  const barAt = (drawing, view, x, y) => {
    let best = null;
    for (const bars of drawing.bars) {
      if (hidden.has(bars.kind)) continue;
      for (let at = 0; at < bars.begin.length; at += 1) {
        const left = view.left(bars.begin[at]);
        const right = left + bars.length[at] * view.perMs;
        if (x < left - NEAR_PX || x > right + NEAR_PX) continue;
        if (Math.abs(y - view.top(bars.center[at])) > (bars.height[at] * view.perLine) / 2) continue;
        const isBeside = x < left || x > right;
        if (best && (isBeside > best.isBeside || (isBeside === best.isBeside && bars.length[at] > best.length))) continue;
        const rank = drawing.shown.ranks[Math.round(bars.center[at])];
        const [span, begin, length] = [bars.spans[at], bars.begin[at], bars.length[at]];
        best = { text: bars.texts[at] || "", span, begin, length, of: bars.of, rank, isBeside };
      }
    }
    if (best && !best.text) best.text = describeSpan(drawing, best.span);
    return best;
  };
  const cellAt = (cells, view, x, y) => {
    const ms = view.x[0] + (x - view.l) / view.perMs;
    const line = Math.round(view.y[1] + (y - view.t) / view.perLine);
    const [begin, end] = cells.ends;
    const bin = Math.floor(((ms - begin) / (end - begin)) * cells.num_bins);
    if (line < 0 || line >= cells.num_lines || bin < 0 || bin >= cells.num_bins) return null;
    const shade = cells.shades[line * cells.num_bins + bin] - 1;
    if (shade < 0 || !cells.labels.length) return null;
    const lone = /[-,]/.test(cells.labels[line]) ? ", or one long span" : "";
    const share = shade % 2 ? `at least half of the pixel${lone}` : "less than half of the pixel";
    return { text: `${cells.kinds[shade >> 1]}\n${cells.labels[line]}\n${share}` };
  };
  const find = (event) => {
    const cover = event.target instanceof Element && event.target.closest(".nsewdrag");
    const gd = cover && cover.closest(".js-plotly-plot");
    const drawing = gd && [...drawings.values()].find((one) => plotOf(one.shown.part) === gd);
    if (!drawing) return null;
    const view = viewOf(drawing);
    const box = canvasOf(drawing.shown.part).parentElement.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const hit = drawing.cells ? cellAt(drawing.cells, view, x, y) : barAt(drawing, view, x, y);
    const ms = view.x[0] + (x - view.l) / view.perMs;
    return { part: drawing.shown.part, hit, ms, top: box.top + view.t, height: view.h };
  };

  let pointed = null; // the last move of the pointer
  const tip = document.createElement("div");
  const cursor = document.createElement("div");
  [tip.className, cursor.className] = ["span-tip", "span-cursor"];
  const hide = () => [tip, cursor].forEach((one) => one.remove());
  const showTip = (event) => {
    pointed = event;
    const found = event.buttons ? null : find(event);
    if (!found) {
      hide();
      return;
    }
    const top = Math.max(found.top, 0);
    cursor.style.cssText = `left:${event.clientX}px;top:${top}px;`
      + `height:${Math.min(found.top + found.height, window.innerHeight) - top}px`;
    const [size, digits, unit] = found.ms < 5000 ? [1, 3, "ms"] : [1000, 6, "s"];
    const at = (found.ms / size).toLocaleString(
      "en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
    const said = (found.hit && found.hit.text) || "";
    const lines = [...(said ? said.split("\n") : []), `at ${at} ${unit}`];
    tip.replaceChildren(...lines.map((text, number) => {
      const line = document.createElement(number || !said ? "div" : "b");
      line.textContent = text;
      return line;
    }));
    document.body.append(cursor, tip);
    const { width, height } = tip.getBoundingClientRect();
    const isRight = event.clientX + width + 24 > window.innerWidth;
    const isLow = event.clientY + height + 24 > window.innerHeight;
    tip.style.left = `${Math.max(4, event.clientX + (isRight ? -width - 14 : 14))}px`;
    tip.style.top = `${Math.max(4, event.clientY + (isLow ? -height - 14 : 14))}px`;
  };
  document.addEventListener("pointermove", showTip, { passive: true });
  document.addEventListener("scroll", hide, { capture: true, passive: true });
  document.documentElement.addEventListener("pointerleave", hide);

  let pressed = null;
  document.addEventListener("pointerdown", (event) => {
    hide();
    pressed = event.button === 0 && find(event)
      ? { x: event.clientX, y: event.clientY, found: find(event) } : null;
  }, { capture: true });
  document.addEventListener("pointerup", (event) => {
    if (!pressed) return;
    const { x, y, found } = pressed;
    pressed = null;
    const isClick = Math.hypot(event.clientX - x, event.clientY - y) < 4;
    if (!isClick || found.part !== "timeline-graph" || !found.hit) return;
    if (found.hit.span === undefined) return;
    window.dash_clientside.timeline.selectSpan(found.hit.rank, found.hit.of, found.hit.begin);
  }, { capture: true });

  window.dash_clientside = window.dash_clientside || {};
  window.dash_clientside.canvas = { draw, hold, images, traces, describe };
})();
