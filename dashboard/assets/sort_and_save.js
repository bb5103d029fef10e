// The findings are sorted by a click on the name of a column, or by Enter or the space bar on it.
const numberIn = (cell) => Number.parseFloat(cell.textContent.replace(/[^0-9.eE-]/g, ""));

const sortRows = (head) => {
  const table = head.closest("table");
  const column = head.cellIndex;
  const down = head.getAttribute("aria-sort") !== "descending";
  const isNumber = head.classList.contains("number");
  const rows = [...table.tBodies[0].rows];
  const order = (one, other) => {
    const [a, b] = [one.cells[column], other.cells[column]];
    if (!isNumber) return a.textContent.localeCompare(b.textContent, "en", { numeric: true });
    const [x, y] = [numberIn(a), numberIn(b)];
    return (Number.isNaN(x) ? -Infinity : x) - (Number.isNaN(y) ? -Infinity : y);
  };
  rows.sort((one, other) => (down ? order(other, one) : order(one, other)));
  for (const each of table.tHead.rows[0].cells) each.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  table.tBodies[0].append(...rows);
};

document.addEventListener("click", (event) => {
  const head = event.target.closest(".findings th");
  if (head) sortRows(head);
});
document.addEventListener("keydown", (event) => {
  const head = event.target.closest(".findings th");
  if (!head || (event.key !== "Enter" && event.key !== " ")) return;
  event.preventDefault();
  sortRows(head);
});
document.addEventListener("focusin", () => {
  for (const head of document.querySelectorAll(".findings th:not([tabindex])")) head.tabIndex = 0;
});

// plotly interprets some HTML in a title.
const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

// A saved picture says of what it is: the tab's title (run, verdict, page) and the address.
document.addEventListener(
  "click",
  (event) => {
    const button = event.target.closest('.modebar-btn[data-title="Download plot as a PNG"]');
    const plot = button && button.closest(".js-plotly-plot");
    if (!plot || !window.Plotly) return;
    event.stopPropagation();
    const ink = getComputedStyle(document.body);
    const { canvas } = window.dash_clientside;
    const images = canvas.images(plot);
    const layout = {
      ...plot.layout,
      paper_bgcolor: ink.backgroundColor,
      font: { ...plot.layout.font, color: ink.color, family: "sans-serif" },
      images,
      showlegend: images.length ? true : plot.layout.showlegend, // the page has that of the timeline
      width: plot.clientWidth,
      height: plot.clientHeight + 44,
      margin: { ...plot.layout.margin, t: ((plot.layout.margin || {}).t || 0) + 44 },
      title: {
        text: [document.title, window.location.href].map(plain).join("<br>"),
        x: 0.01, xanchor: "left", y: 1, yref: "container", yanchor: "top", pad: { t: 22 },
        font: { size: 13 },
      },
    };
    const name = document.title.replace(/[^A-Za-z0-9._-]+/g, "-");
    const options = { format: "png", scale: 2, filename: name, width: layout.width, height: layout.height };
    window.Plotly.downloadImage({ data: canvas.traces(plot), layout }, options);
  },
  true,
);
