// Ctrl+K: pages, runs, hosts and ranks by name, and views that a reader has saved in this browser.
const PALETTE_ROWS = 12;
let offered = null; // until the server has answered
let isEntered = false; // Enter was pressed before that
let chosen = 0;

// A saved view is an address with a name. One for all runs is opened with the run that is shown.
const SAVED_VIEWS = "rankscope-views";
const MAX_SAVED = 50;

function savedViews() {
  try {
    const views = JSON.parse(localStorage.getItem(SAVED_VIEWS) || "[]");
    return Array.isArray(views) ? views.filter(({ name, href }) => name && href) : [];
  } catch (error) {
    return []; // private windows may have no storage
  }
}

function saveViews(views) {
  try {
    localStorage.setItem(SAVED_VIEWS, JSON.stringify(views.slice(-MAX_SAVED)));
  } catch (error) {
    window.alert("This browser keeps no data of pages: the view is not saved.");
  }
}

// The address of a view with another run, or without one: the overview has its run in the path.
function withRun(href, run) {
  const url = new URL(href, window.location.origin);
  if (url.pathname === "/" || url.pathname.startsWith("/run/")) {
    return run ? `/run/${encodeURIComponent(run)}` : "/";
  }
  url.searchParams.delete("run");
  if (run && offered.pages_of_run.includes(url.pathname)) url.searchParams.set("run", run);
  return `${url.pathname}${url.search}`;
}

function savedPlaces() {
  return savedViews().map(({ name, href, is_for_all }) => ({
    label: name,
    kind: is_for_all ? "view of any run" : "view",
    href: is_for_all ? withRun(href, offered.run) : href,
    remove: () => saveViews(savedViews().filter((view) => view.name !== name)),
  }));
}

// What is typed is the name under which the shown view can be saved.
function placesToSave(name) {
  if (!name) return [];
  const here = window.location.pathname + window.location.search;
  const others = savedViews().filter((view) => view.name !== name);
  const save = (href, is_for_all) => () => saveViews([...others, { name, href, is_for_all }]);
  const places = [{ label: `Save this view as “${name}”`, kind: "save", act: save(here, false) }];
  const anyRun = withRun(here, "");
  if (anyRun !== here) {
    places.push({ label: `Save it for any run as “${name}”`, kind: "save", act: save(anyRun, true) });
  }
  return places;
}

// A number is a rank; words must all be in the label, in any order.
function matchPlaces(text) {
  if (!offered) return [];
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const number = words.find((word) => /^\d+$/.test(word));
  const { num_ranks, rank_address } = offered;
  const ranks = [];
  if (number !== undefined && Number(number) < num_ranks) {
    const glue = rank_address.includes("?") ? "&" : "?";
    const href = `${rank_address}${glue}rank=${Number(number)}`;
    ranks.push({ label: `Rank ${Number(number)}`, kind: "rank", href });
  }
  const named = [...savedPlaces(), ...offered.places].filter(({ label, kind }) => {
    const searched = `${label} ${kind}`.toLowerCase();
    return words.every((word) => searched.includes(word));
  });
  return [...[...ranks, ...named].slice(0, PALETTE_ROWS), ...placesToSave(text.trim())];
}

function showPlaces(dialog) {
  const matches = matchPlaces(dialog.querySelector("input").value);
  chosen = Math.min(chosen, Math.max(matches.length - 1, 0));
  const rows = matches.map((place, index) => {
    const { label, kind, href, remove } = place;
    const row = document.createElement("li");
    const link = document.createElement("a");
    link.href = href || "#";
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
      take(dialog, place);
    });
    row.append(link);
    if (remove) row.append(removeButton(dialog, label, remove));
    return row;
  });
  if (!rows.length) {
    const none = document.createElement("li");
    none.className = "quiet";
    none.textContent = offered ? "type the name of a page, run, host, rank or view" : "loading";
    rows.push(none);
  }
  dialog.querySelector("ul").replaceChildren(...rows);
}

function removeButton(dialog, label, remove) {
  const button = document.createElement("button");
  button.textContent = "×";
  button.title = `Remove the view ${label}`;
  button.addEventListener("click", () => {
    remove();
    showPlaces(dialog);
    dialog.querySelector("input").focus();
  });
  return button;
}

function take(dialog, { href, act }) {
  dialog.close();
  if (act) act();
  else window.dash_clientside.set_props("url", { href });
}

function makePalette() {
  const dialog = document.createElement("dialog");
  dialog.id = "palette";
  dialog.setAttribute("aria-label", "go to a page, run, host, rank or saved view, or save this view");
  const input = document.createElement("input");
  input.placeholder = "page, run, host, rank number or saved view; a name to save this view";
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
      links[chosen].click();
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
      if (link) link.click();
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

// P: the proof in the focused row or on the page, else that of the run's top finding.
function openProof() {
  const row = document.activeElement && document.activeElement.closest("tr");
  const link =
    (row && row.querySelector(".proof-link")) ||
    document.querySelector("main .proof-link") ||
    document.querySelector(".proof-link");
  if (link) link.click();
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
