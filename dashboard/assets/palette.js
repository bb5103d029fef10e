// Ctrl+K: pages, runs, hosts and ranks by name.
const PALETTE_ROWS = 12;
let offered = { places: [], num_ranks: 0, rank_address: "" };
let chosen = 0;

// A number is a rank; words must all be in the label, in any order.
function matchPlaces(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const number = words.find((word) => /^\d+$/.test(word));
  const ranks = [];
  if (number !== undefined && Number(number) < offered.num_ranks) {
    const glue = offered.rank_address.includes("?") ? "&" : "?";
    const href = `${offered.rank_address}${glue}rank=${Number(number)}`;
    ranks.push({ label: `Rank ${Number(number)}`, kind: "rank", href });
  }
  const named = offered.places.filter(({ label, kind }) => {
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
    none.textContent = "no page, run, host or rank of this name";
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
    if (places) offered = places;
    return window.dash_clientside.no_update;
  },

  openPalette() {
    const dialog = document.getElementById("palette") || makePalette();
    if (dialog.open) return;
    dialog.querySelector("input").value = "";
    chosen = 0;
    showPlaces(dialog);
    dialog.showModal();
  },
});

// P: the proof in the focused row or on the page, else that of the run's top finding.
function openProof() {
  const row = document.activeElement && document.activeElement.closest("tr");
  const link = (row && row.querySelector(".proof-link")) || document.querySelector("main .proof-link");
  const place = offered.places.find(({ kind }) => kind === "proof");
  if (link) link.click();
  else if (place) window.dash_clientside.set_props("url", { href: place.href });
}

document.addEventListener("keydown", (event) => {
  const isPlain = !event.ctrlKey && !event.metaKey && !event.altKey;
  const isTyped = event.target.closest("input, textarea, select, [contenteditable], [role=listbox]");
  if (event.key.toLowerCase() === "p" && isPlain && !isTyped) openProof();
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") {
    event.preventDefault();
    window.dash_clientside.rankscope.openPalette();
  }
});
