// Cells of the table of runs. React escapes their text.
const grids = (window.dashAgGridComponentFunctions = window.dashAgGridComponentFunctions || {});

grids.RunLink = ({ data, value }) =>
  React.createElement("a", { href: data.href, title: value, className: "run-link" }, value);

grids.Verdict = ({ data, value }) =>
  React.createElement("span", { className: `cause ${data.style}`, title: data.sentence }, value);

grids.RunState = ({ data, value }) =>
  React.createElement(
    "span",
    { className: data.silent ? "run-state attention" : "run-state" },
    data.live ? React.createElement("span", { className: "live-mark", "aria-hidden": true }) : null,
    value,
  );

// A deletion goes to the same route as that of the command; the server checks who may.
window.dash_clientside.rankscope.deleteRuns = async (clicks, chosen, url) => {
  const none = window.dash_clientside.no_update;
  if (!clicks || !chosen || !chosen.length) return none;
  const failed = [];
  for (const { run } of chosen) {
    try {
      const answer = await fetch(`${url}?run_id=${encodeURIComponent(run)}`, { method: "DELETE" });
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
  return [`${done} deleted.`, ...failed].join(" ");
};

window.dash_clientside.rankscope.closeDialog = () => false;

window.dash_clientside.rankscope.setTitle = (title) => {
  if (title) document.title = title;
  return window.dash_clientside.no_update;
};
