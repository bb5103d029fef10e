// Ctrl+K: pages, runs, hosts and ranks by name.
const PALETTE_ROWS = 12;
const NO_PLACES = { places: [], num_ranks: 0, rank_address: "" };
let offered = null; // until the server has answered
let isEntered = false; // Enter was pressed before that
let chosen = 0;

// A number is a rank; words must all be in the label, in any order.
function matchPlaces(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const number = words.find((word) => /^\d+$/.test(word));
  const { places, num_ranks, rank_address } = offered || NO_PLACES;
  const ranks = [];
  if (number !== undefined && Number(number) < num_ranks) {
    const glue = rank_address.includes("?") ? "&" : "?";
    const href = `${rank_address}${glue}rank=${Number(number)}`;
    ranks.push({ label: `Rank ${Number(number)}`, kind: "rank", href });
  }
  const named = places.filter(({ label, kind }) => {
    const searched = `${label} ${kind}`.toLowerCase();
    return words.every((word) => searched.includes(word));
  });
  return [...ranks, ...named].slice(0, PALETTE_ROWS);
}

function showPlaces(dialog) {
  const matches = matchPlaces(dialog.querySelector("input").value);
  chosen = Math.min(chosen, Math.max(matches.length - 1, 0));
  const rows = matches.map(({ label, kind, href }, index) => {
    const row = document.createElement("li");
    const link = document.createElement("a");
    link.href = href;
    link.setAttribute("role", "option");
    link.setAttribute("aria-selected", String(index === chosen));
    for (const [text, name] of [[label, ""], [kind, "quiet"]]) {
      const part = document.createElement("span");
      part.textContent = text;
      part.className = name;
      link.append(part);
    }
    link.addEventListener("click", (event) => {
      if (event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      goTo(dialog, href);
    });
    row.append(link);
    return row;
  });
  if (!rows.length) {
    const none = document.createElement("li");
    none.className = "quiet";
    none.textContent = offered ? "no page, run, host or rank of this name" : "loading";
    rows.push(none);
  }
  dialog.querySelector("ul").replaceChildren(...rows);
}

function goTo(dialog, href) {
  dialog.close();
  window.dash_clientside.set_props("url", { href });
}

function makePalette() {
  const dialog = document.createElement("dialog");
  dialog.id = "palette";
  dialog.setAttribute("aria-label", "go to a page, run, host or rank");
  const input = document.createElement("input");
  input.placeholder = "page, run, host or rank number";
  input.setAttribute("role", "combobox");
  const list = document.createElement("ul");
  list.setAttribute("role", "listbox");
  dialog.append(input, list);
  input.addEventListener("input", () => {
    chosen = 0;
    showPlaces(dialog);
  });
  input.addEventListener("keydown", (event) => {
    const links = dialog.querySelectorAll("a");
    if (event.key === "Enter" && links.length) {
      goTo(dialog, links[chosen].getAttribute("href"));
    } else if ((event.key === "ArrowDown" || event.key === "ArrowUp") && links.length) {
      chosen = (chosen + (event.key === "ArrowDown" ? 1 : links.length - 1)) % links.length;
      showPlaces(dialog);
    } else if (event.key === "Enter" && !offered) {
      isEntered = true;
    } else return;
    event.preventDefault();
  });
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close(); // beside it
  });
  document.body.append(dialog);
  return dialog;
}

Object.assign(window.dash_clientside.rankscope, {
  offerPlaces(places) {
    const dialog = document.getElementById("palette");
    if (places && dialog && dialog.open) {
      offered = places;
      showPlaces(dialog);
      const link = isEntered && dialog.querySelector("a");
      if (link) goTo(dialog, link.getAttribute("href"));
    }
    return window.dash_clientside.no_update;
  },

  openPalette() {
    const dialog = document.getElementById("palette") || makePalette();
    if (dialog.open) return;
    dialog.querySelector("input").value = "";
    chosen = 0;
    offered = null; // of the page that was open before
    isEntered = false;
    showPlaces(dialog);
    dialog.showModal();
    window.dash_clientside.set_props("palette-asked", { data: Date.now() });
  },
});

document.addEventListener("keydown", (event) => {
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") {
    event.preventDefault();
    window.dash_clientside.rankscope.openPalette();
  }
});
