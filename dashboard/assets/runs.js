// Cells of the table of runs. React escapes their text.
const grids = (window.dashAgGridComponentFunctions = window.dashAgGridComponentFunctions || {});

grids.RunLink = ({ data, value }) =>
  React.createElement("a", { href: data.href, title: value, className: "run-link" }, value);

grids.Verdict = ({ data, value }) =>
  React.createElement(
    data.incident ? "a" : "span",
    { className: `cause ${data.style}`, title: data.sentence, href: data.incident || undefined },
    value,
  );

grids.RunTags = ({ value }) =>
  (value || []).map((tag) => {
    const href = `?find=${encodeURIComponent(tag)}`;
    return React.createElement("a", { key: tag, href, className: "tag", title: `only runs with tag ${tag}` }, tag);
  });

// `local_time.js` writes it in the reader's zone.
grids.LocalTime = ({ value }) =>
  /^\d/.test(value || "")
    ? React.createElement("time", { dateTime: `${value.replace(" ", "T")}Z` }, `${value} UTC`)
    : value;

grids.RunState = ({ data, value }) =>
  React.createElement(
    "span",
    { className: data.silent ? "run-state attention" : "run-state" },
    data.live ? React.createElement("span", { className: "live-mark", "aria-hidden": true }) : null,
    value,
  );

// On a phone, a pinned column would leave the verdict half of its width: none is pinned, and each
// verdict is beneath the name of its run.
const NARROW = "(max-width: 620px)";
window.dash_clientside.rankscope.fitRuns = (id, columns, options) => {
  const none = window.dash_clientside.no_update;
  if (!matchMedia(NARROW).matches) return [none, none];
  const fitted = columns.flatMap((column) => {
    if (column.field === "verdict") return [];
    if (column.field !== "run") return [column];
    return [{ ...column, pinned: null, cellRenderer: "RunVerdict", minWidth: 226 }];
  });
  const boxes = { ...options.selectionColumnDef, pinned: null };
  return [fitted, { ...options, rowHeight: 56, selectionColumnDef: boxes }];
};

grids.RunVerdict = ({ data, value }) =>
  React.createElement(
    "div",
    { className: "run-verdict" },
    grids.RunLink({ data, value }),
    grids.Verdict({ data, value: data.verdict }),
  );

// A deletion goes to the same route as that of the command; the server checks who may.
window.dash_clientside.rankscope.deleteRuns = async (clicks, chosen) => {
  const none = window.dash_clientside.no_update;
  if (!clicks || !chosen || !chosen.length) return [none, none];
  const failed = [];
  for (const { run } of chosen) {
    try {
      const answer = await fetch(`/v1/runs?run_id=${encodeURIComponent(run)}`, { method: "DELETE" });
      if (answer.ok) continue;
      const why =
        answer.status === 403
          ? "this session may only read; use the URL that rankscope serve printed"
          : `the server answered ${answer.status}`;
      failed.push(`${run}: not deleted, ${why}.`);
    } catch (error) {
      failed.push(`${run}: not deleted, the server did not answer.`);
    }
  }
  const done = chosen.length - failed.length;
  return [[`${done} deleted.`, ...failed].join(" "), clicks]; // the page is refreshed
};

window.dash_clientside.rankscope.closeDialog = () => false;

window.dash_clientside.rankscope.setTitle = (title) => {
  if (title) document.title = title;
  return window.dash_clientside.no_update;
};
