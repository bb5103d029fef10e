// Dash's Graph writes a reader's zoom back into its figure, where plotly's uirevision no longer
// protects it: the next figure from the server would undo it. So the server's figure passes
// through here, and each axis that the reader has zoomed keeps its range while its uirevision
// stays the same.
const keepRanges = (fresh, before) => {
  const layout = { ...fresh.layout };
  for (const name of Object.keys(layout)) {
    if (!/^[xy]axis\d*$/.test(name)) continue;
    const axis = layout[name];
    const old = before[name];
    const revision = axis.uirevision || layout.uirevision;
    if (!old || revision !== (old.uirevision || before.uirevision)) continue;
    if (old.autorange !== false || !old.range) continue;
    layout[name] = { ...axis, range: old.range, autorange: false };
  }
  return { ...fresh, layout };
};

// What the canvas under a figure has drawn is seen first, then plotly draws the axes. A hidden page
// has no frames to wait for.
const afterCanvas = async (id) => {
  if (!document.getElementById(`${id}-canvas`) || document.hidden) return;
  await new Promise((done) => { requestAnimationFrame(() => setTimeout(done)); });
};

// Stores inside new children, whose callbacks Dash runs for its own outputs only.
const announceStores = (children) => {
  if (Array.isArray(children)) children.forEach(announceStores);
  if (!children || !children.props) return;
  const { id, data } = children.props;
  if (children.type === "Store" && data) window.dash_clientside.set_props(id, { data });
  announceStores(children.props.children);
};

window.dash_clientside = window.dash_clientside || {};
window.dash_clientside.rankscope = {
  // The address that the page is asked for; not that of a zoom into what is loaded.
  askPage(path, search, before) {
    const asked = `${path}${search || ""}`;
    const isSame = before !== undefined && before.split("?")[0] === path;
    const isAsked = isSame && window.dash_clientside.timeline.isAsked(search);
    if (isAsked) return window.dash_clientside.no_update;
    document.body.classList.toggle("page-asked", before !== undefined && asked !== before);
    return asked;
  },

  endNavigation() {
    document.body.classList.remove("page-asked");
  },

  // New properties by component and name. Everything else stays as the reader has left it.
  async applyChanges(changes) {
    for (const [id, { figure, ...properties }] of Object.entries(changes || {})) {
      window.dash_clientside.set_props(id, properties);
      announceStores(properties.children);
    }
    for (const [id, { figure }] of Object.entries(changes || {})) {
      if (!figure) continue;
      await afterCanvas(id);
      const shown = document.querySelector(`#${CSS.escape(id)} .js-plotly-plot`);
      const kept = keepRanges(figure, (shown && shown.layout) || {});
      window.dash_clientside.set_props(id, { figure: kept });
    }
  },

  // A button turns one of the timeline's layers on or off; the address holds which are on.
  toggleLayer(...clicks) {
    const of = window.dash_clientside.callback_context.triggered[0];
    if (!of || !of.value) return window.dash_clientside.no_update; // the buttons were made anew
    const layer = of.prop_id.split(".")[0].replace("timeline-", "");
    const query = new URLSearchParams(window.location.search);
    const shown = new Set((query.get("layers") || "").split(",").filter(Boolean));
    if (!shown.delete(layer)) shown.add(layer);
    query.delete("layers");
    if (shown.size) query.set("layers", [...shown].join(","));
    return `?${query}`;
  },

  // The page and the run of an address: what the frame around the page shows.
  findPlace(path, search, before) {
    const run = new URLSearchParams(search || "").get("run") || "";
    const place = `${path} ${run}`;
    return place === before ? window.dash_clientside.no_update : place;
  },
};

// A finger that moves over a figure scrolls the page: plotly would zoom. The timeline is for zooming.
document.addEventListener(
  "touchstart",
  (event) => {
    if (event.target.closest(".dash-graph:not(#timeline-graph) .js-plotly-plot")) {
      event.stopPropagation();
    }
  },
  { capture: true, passive: true },
);

// What is typed into a chooser replaces its old text.
document.addEventListener("focusin", (event) => {
  const input = event.target;
  if (input instanceof HTMLInputElement && input.matches(".mantine-Select-input")) input.select();
});
