"""Times of the dashboard in a real Chromium, against a `rankscope serve` of its own.

    python -m benchmarks.browser [--rounds 7] [--proofs 7] [--grow 1e6,1e7] [--folder DIR] > FILE

The store has a simulated run of 12,288 ranks (18 million spans in 4 steps), one of 512 and 8 of 64.
A first server makes their reports and pictures; a second one is measured, so nothing is in its
memory. Each round is a new Chromium without a cache, 1400 x 900 pixels, software rendering:

* *first words*, *verdict*: navigation to the large run until they are painted;
* *first picture*: navigation to a step of it until its picture is painted, and the same by a click;
  plotly's axes of each picture are timed too;
* *wheel*: a notch with Ctrl, until the picture of the server's answer is painted, with the bytes
  received for it; the assets wait 60 ms for further notches;
* *pan*: a move of the pointer until the frame that shows it;
* *step of 64 ranks*: a click on "next step" until all its bars are painted.

* *proof*: a click on the proof of an overview that is quiet, at 512 and 12,288 ranks, until its
  folded timeline is painted: *first* with a server of its own each time, which has read no step;
  *again* in a new page of the same server;
* *play*: navigation to What if of the same runs until the first step is replayed, then each change
  until its sentence is painted: a finding fixed, stages balanced, a rank scaled.

Painted is the end of the frame that shows the change. Beside each time are the CPU seconds of the
server and of Chromium until the page is quiet, which other work on the machine changes less.

*Viewers* send the requests that Chromium sent for a page and its zooms, one of them in two seconds.
*Growth* times what the pages of a run of 64 ranks ask a new data provider for, with other runs
stored beside it.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import multiprocessing
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

import numpy as np
import psutil
from playwright.sync_api import sync_playwright
from scipy import stats

from rankscope.analysis.drawing.rows import RowOrder
from rankscope.collector.store.store import open_store
from rankscope.server.provider import StoreProvider
from rankscope.server.reports import Reports
from rankscope.sources.store_source import StoreSource
from rankscope.sources.stored_reports import StoredReports
from tests.browser.conftest import NAMES
from tests.integration.programs import COMMAND, Server, environment, serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from playwright.sync_api import Browser, Page, Request

LARGE, MIDDLE, SMALL = "large", "middle", "small"
SIMULATED_LARGE = "slow-compute --ranks 12288 --pp 8 --tp 8 --seed 7 --steps {}".format
SIMULATED_MIDDLE = "slow-compute --ranks 512 --pp 8 --tp 8 --seed 7 --steps 8"
SIMULATED_SMALL = "slow-compute --ranks 64 --steps 24 --seed {}".format
NUM_SMALL, NUM_STEPS = 8, 4
SMALL_SPANS, LARGE_STEP_SPANS = 122_880, 4_521_984
NUM_ZOOMS, NUM_MOVES, NUM_CLICKS, NUM_QUERIES = 6, 40, 8, 9
NUM_VIEWERS, VIEW_S, GESTURE_S, ZOOMS_PER_PAGE = 20, 40.0, 2.0, 5
TIMEOUT_S, PAGE_S, QUIET_S = 3600.0, 180.0, 0.5

PICTURE = ("drawing", "axes")
"""Parts of a step that are painted: its spans, and plotly's axes of them."""

Post = tuple[str, bytes]
"""Path and body of a request of a browser, which is sent again."""

WATCH = """
window.painted = {}; window.moves = []; window.begun = 0;
const canvas = () => document.getElementById('timeline-graph-canvas');
const states = {
  words: () => document.querySelector('.brand'),
  verdict: () => /rank|healthy/i.test(document.querySelector('#page h1')?.innerText),
  drawing: () => canvas()?.dataset.drawn,
  axes: () => canvas()?.dataset.plotted,
  played: () => document.getElementById('what-if-sentence')
    && [...document.querySelectorAll('#what-if-sentence, #page .choice.chosen')]
      .map(part => part.innerText).join(),
};
const last = {};
const afterFrame = then => requestAnimationFrame(() => setTimeout(then));
const look = () => {
  for (const [name, state] of Object.entries(states)) {
    const now = state();
    if (!now || now === last[name]) continue;
    last[name] = now;
    setTimeout(() => { window.painted[name] = performance.now(); }); // after this frame's paint
  }
  requestAnimationFrame(look);
};
requestAnimationFrame(look);
for (const kind of ['wheel', 'click', 'change'])
  addEventListener(kind, event => { window.begun = event.timeStamp; }, {capture: true});
addEventListener('mousemove', event => afterFrame(
  () => window.moves.push(performance.now() - event.timeStamp)), {capture: true});
"""
"""Notes when the page shows other data (`painted`) and when it got its last gesture (`begun`)."""


@dataclass(slots=True)
class Samples:
    """Values by name."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        """Add a value."""
        print(f"{name} {value:.3f}", file=sys.stderr)
        self.values.setdefault(name, []).append(value)

    @contextmanager
    def costing(self, name: str, processes: Callable[[], float]) -> Iterator[None]:
        """Add the wall clock and CPU time of a block."""
        wall, cpu = time.perf_counter(), processes()
        yield
        self.add(f"{name}_s", time.perf_counter() - wall)
        self.add(f"{name}_cpu_s", processes() - cpu)

    def document(self) -> dict[str, dict[str, float]]:
        """Return median, quantiles and number by name."""
        return {
            name: {
                "median": round(statistics.median(found), 4),
                "p90": round(float(np.quantile(found, 0.9)), 4),
                "p95": round(float(np.quantile(found, 0.95)), 4),
                "num": len(found),
            }
            for name, found in self.values.items()
        }


def main() -> None:
    """Run the benchmark and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--proofs", type=int, default=7, help="rounds of proof and play")
    parser.add_argument("--grow", default="", help="numbers of stored spans, such as 1e6,1e7,1e8")
    parser.add_argument("--folder", type=Path, help="keep the stores here, and use them again")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        found: dict[str, Any] = {"cpus": os.cpu_count(), "load_before": os.getloadavg()[0]}
        if options.rounds or options.proofs:
            found["making"] = make_runs(folder / "pages")
        if options.rounds:
            found |= measure_pages(folder / "pages", options.rounds)
        if options.proofs:
            found["proofs"] = measure_proofs(folder / "pages", options.proofs)
        if sizes := [int(float(size)) for size in options.grow.split(",") if size]:
            found["growth"] = measure_growth(folder, sizes)
        found["load_after"] = os.getloadavg()[0]
    print(json.dumps(found, indent=2))


def make_runs(store: Path) -> dict[str, Any]:
    """Make the runs of a store unless it exists, then their reports and pictures."""
    if not store.exists():
        for number in range(NUM_SMALL):
            simulate(store, f"{SMALL}-{number}", SIMULATED_SMALL(number))
        simulate(store, MIDDLE, SIMULATED_MIDDLE)
        simulate(store, LARGE, SIMULATED_LARGE(NUM_STEPS))
    with serving(store=store) as server, watched(server) as making:
        num_spans = wait_until_ready(server, num_runs=NUM_SMALL + 2)
    return {"num_spans": num_spans, **making}


def measure_proofs(store: Path, num_rounds: int) -> dict[str, dict[str, float]]:
    """Return the times from an overview to the timeline of its proof."""
    samples = Samples()
    for _ in range(num_rounds):
        for run in (MIDDLE, LARGE):
            with serving(store=store) as server, chromium() as browser:
                for name in ("first", "again"):
                    seen = Visit(browser, server, samples)
                    seen.page.goto(f"{server.url}/run/{run}")
                    proof = seen.page.locator("main .proof-link").first
                    proof.wait_for()
                    seen.settle()
                    seen.time(f"proof_{run}_{name}", proof.click, *PICTURE)
                time_plays(Visit(browser, server, samples), f"{server.url}/what-if?run={run}", run)
    return samples.document()


def time_plays(seen: Visit, address: str, run: str) -> None:
    """Measure the first replay of a run on its page, and that after each change."""
    page = seen.page
    seen.time(f"play_{run}_open", lambda: page.goto(address), "played")
    changes = {
        "fix": page.get_by_label("fix").locator(".choice").first,
        "stages": page.get_by_text("equal stages", exact=True).last,
    }
    for name, choice in changes.items():
        seen.time(f"play_{run}_{name}", choice.click, "played")

    def scale() -> None:
        page.fill("#what-if-scale", "33 x 0.7")
        page.keyboard.press("Enter")

    seen.time(f"play_{run}_scale", scale, "played")


def measure_pages(store: Path, num_rounds: int) -> dict[str, Any]:
    """Return the times of a store's pages, in a browser and for several viewers."""
    samples, posts = Samples(), {}
    with serving(store=store) as server, watched(server) as peak:
        for _ in range(num_rounds):
            posts = visit(server, samples)
        alone, many = (crowd(server, posts, num=num) for num in (1, NUM_VIEWERS))
    return {
        "serving": peak,
        "pages": samples.document(),
        "viewers": {"1": alone, str(NUM_VIEWERS): many},
        "ratio_of_p95": {name: round(many[name]["p95"] / alone[name]["p95"], 2) for name in posts},
    }


def simulate(store: Path, run: str, arguments: str) -> None:
    """Store a simulated run."""
    command = [*COMMAND, "simulate", *arguments.split(), "--run", run]
    subprocess.run(command, env=environment(store), check=True, stdout=sys.stderr)


def wait_until_ready(server: Server, *, num_runs: int) -> int:
    """Wait until each run has its report, and each step its picture; return the spans."""
    until = time.monotonic() + TIMEOUT_S
    done = "SELECT uniqExact(run_id) FROM closed_steps WHERE step = -1"  # a row for the whole run
    for statement in ("SELECT uniqExact(run_id) FROM reports", done):
        while query(server, statement) < num_runs:
            if time.monotonic() > until:
                raise SystemExit("the server has not made all reports and pictures")
            time.sleep(1)
    return query(server, "SELECT count() FROM spans")


def query(server: Server, statement: str) -> int:
    """Return the number that a statement selects."""
    path = "/?" + urlencode({"query": f"{statement} FORMAT TSV"})
    with closing(connect(server)) as connection:
        connection.request("GET", path, headers=server.bearer)
        answer = connection.getresponse()
        text = answer.read().decode()
    if answer.status != 200:
        raise SystemExit(f"{statement}: {text}")
    return int(text)


def connect(server: Server) -> http.client.HTTPConnection:
    """Return a new connection."""
    return http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=120)


@contextmanager
def watched(server: Server) -> Iterator[dict[str, float]]:
    """Fill the peaks of resident memory of a server, and of its children together."""
    peak = {"server_peak_gb": 0.0, "children_peak_gb": 0.0}
    process, stop = psutil.Process(server.process.pid), threading.Event()

    def look() -> None:
        while not stop.wait(0.1):
            with suppress(psutil.NoSuchProcess):
                children = process.children(recursive=True)
                for name, each in (("server", [process]), ("children", children)):
                    found_gb = sum(one.memory_info().rss for one in each) / 1e9
                    peak[f"{name}_peak_gb"] = max(peak[f"{name}_peak_gb"], round(found_gb, 3))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield peak
    finally:
        stop.set()
        thread.join()


def cpu_s() -> float:
    """Return the CPU time of this process's children, server and Chromium, so far."""
    return sum(cpu_by_part_s())


def cpu_by_part_s() -> tuple[float, float]:
    """Return the CPU time of the server and that of Chromium with its driver so far."""
    server, browser = 0.0, 0.0
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            spent = sum(one.cpu_times()[:2])  # user and system
            if one.name().startswith(("chrom", "node")):
                browser += spent
            else:
                server += spent
    return server, browser


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start a Chromium, and end it after the block."""
    program = next(path for path in map(shutil.which, NAMES) if path)
    flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=flags)
        yield browser
        browser.close()


class Visit:
    """A Chromium with one signed-in page.

    Args:
        browser: The Chromium.
        server: The server.
        samples: Gets what is measured.
    """

    def __init__(self, browser: Browser, server: Server, samples: Samples) -> None:
        for one in browser.contexts:
            one.close()
        size: Any = {"width": 1400, "height": 900}
        context = browser.new_context(viewport=size)
        context.request.get(f"{server.url}/?token={server.token}")
        context.add_init_script(WATCH)
        self.page: Page = context.new_page()
        self.page.set_default_timeout(PAGE_S * 1000)
        self.posts: list[Post] = []
        self._samples, self._num_open, self._num_bytes = samples, 0, 0
        self.page.on("request", self._note)
        self.page.on("requestfinished", self._note_end)
        self.page.on("requestfailed", self._note_end)
        session = context.new_cdp_session(self.page)
        session.send("Network.enable")
        session.on("Network.loadingFinished", self._count)

    def _note(self, request: Request) -> None:
        self._num_open += 1
        parts = urlsplit(request.url)
        if parts.path.endswith("/_dash-update-component"):
            self.posts.append((f"{parts.path}?{parts.query}", request.post_data_buffer or b""))

    def _note_end(self, _: Request) -> None:
        self._num_open -= 1

    def _count(self, event: dict[str, Any]) -> None:
        self._num_bytes += event["encodedDataLength"]

    def settle(self) -> None:
        """Wait until the page has had no request for a while."""
        quiet_from, num_posts = time.monotonic(), -1
        while time.monotonic() < quiet_from + QUIET_S:
            if self._num_open or len(self.posts) != num_posts:
                quiet_from, num_posts = time.monotonic(), len(self.posts)
            self.page.wait_for_timeout(50)

    def time(self, name: str, gesture: Callable[[], object], *parts: str) -> list[Post]:
        """Measure from a gesture until the page has painted parts anew; return its requests."""
        self.posts.clear()
        self._num_bytes = 0
        # Not wait_for_function: the content security policy refuses what it evaluates.
        self.page.evaluate("window.painted = {}")
        server_s, browser_s = cpu_by_part_s()
        gesture()
        for part in parts:
            until = time.monotonic() + PAGE_S
            while (painted := self.page.evaluate(f"window.painted.{part}")) is None:
                if time.monotonic() > until:
                    raise SystemExit(f"{self.page.url} never shows {part} after {name}")
                self.page.wait_for_timeout(20)
            begun = self.page.evaluate("window.begun")
            self._samples.add(f"{name}_{part}_s", (painted - begun) / 1000)
        self.settle()
        server_end_s, browser_end_s = cpu_by_part_s()
        self._samples.add(f"{name}_server_cpu_s", server_end_s - server_s)
        self._samples.add(f"{name}_browser_cpu_s", browser_end_s - browser_s)
        self._samples.add(f"{name}_kb", self._num_bytes / 1000)
        return list(self.posts)

    def place(self, share: float) -> tuple[float, float]:
        """Return a place on the picture."""
        box = self.page.locator("#timeline-graph .nsewdrag").first.bounding_box()
        assert box is not None
        return box["x"] + share * box["width"], min(box["y"] + 100, 850)

    def zoom(self) -> None:
        """Turn the wheel by a notch."""
        self.page.keyboard.down("Control")
        self.page.mouse.wheel(0, -120)
        self.page.keyboard.up("Control")

    def pan(self) -> None:
        """Drag a zoomed picture, and add the time of each frame."""
        x, y = self.place(0.7)
        self.page.mouse.move(x, y)
        self.zoom()
        self.settle()
        self.page.mouse.down()
        self.page.evaluate("window.moves = []")
        for number in range(NUM_MOVES):
            self.page.mouse.move(x - 8 * number, y)
        self.page.mouse.up()
        self.settle()
        for delay in self.page.evaluate("window.moves"):
            self._samples.add("pan_s", delay / 1000)


def visit(server: Server, samples: Samples) -> dict[str, list[Post]]:
    """Measure one round; return the requests of the timeline's page and of its zooms."""
    with chromium() as browser:
        seen = Visit(browser, server, samples)
        seen.time("open", lambda: seen.page.goto(f"{server.url}/run/{LARGE}"), "words", "verdict")
        menu = seen.page.locator(".menu a", has_text="Timeline")
        seen.time("click", menu.click, *PICTURE)
        seen = Visit(browser, server, samples)
        step = f"{server.url}/timeline?run={LARGE}&step={NUM_STEPS - 1}"
        posts = {"page": seen.time("picture", lambda: seen.page.goto(step), *PICTURE), "zoom": []}
        for number in range(NUM_ZOOMS):
            seen.page.mouse.move(*seen.place((number + 0.5) / NUM_ZOOMS))
            sent = seen.time("wheel", seen.zoom, *PICTURE)
            posts["zoom"] += [one for one in sent if b"page-asked" in one[1]]
            seen.page.keyboard.press("0")
            seen.settle()
        seen.pan()
        seen = Visit(browser, server, samples)
        seen.page.goto(f"{server.url}/timeline?run={SMALL}-1&step=1")
        for _ in range(NUM_CLICKS):
            seen.page.wait_for_selector("#timeline-graph-canvas[data-plotted]")
            seen.settle()
            button = seen.page.locator(".stepper a[title='next step']")
            seen.time("step_of_64", button.click, *PICTURE)
    return posts


def crowd(server: Server, posts: dict[str, list[Post]], *, num: int) -> dict[str, Any]:
    """Return the times of the answers that viewers get who look at one run at once."""
    times, until = Samples(), time.monotonic() + VIEW_S

    def view(number: int) -> None:
        chance = random.Random(number)
        time.sleep(chance.uniform(0, GESTURE_S))
        with closing(connect(server)) as connection:
            connection.request("GET", f"/?token={server.token}")
            answer = connection.getresponse()
            answer.read()
            headers = {
                "cookie": (answer.getheader("set-cookie") or "").partition(";")[0],
                "origin": server.url,
                "content-type": "application/json",
                "accept-encoding": "gzip",
            }
            for turn in itertools.count():
                begun = time.monotonic()
                if begun > until:
                    break
                part = "zoom" if turn % ZOOMS_PER_PAGE else "page"
                chosen = [chance.choice(posts["zoom"])] if part == "zoom" else posts["page"]
                for path, body in chosen:
                    connection.request("POST", path, body=body, headers=headers)
                    answer = connection.getresponse()
                    answer.read()
                    if answer.status not in (200, 204):
                        raise SystemExit(f"the server answered {answer.status} to a viewer")
                times.add(part, time.monotonic() - begun)
                time.sleep(GESTURE_S * chance.uniform(0.8, 1.2))

    before = cpu_s()
    with ThreadPoolExecutor(num) as pool:
        list(pool.map(view, range(num)))
    return times.document() | {"cpu_s": round(cpu_s() - before, 2)}


def measure_growth(folder: Path, sizes: Sequence[int]) -> dict[str, Any]:
    """Return the times of a provider's queries by the number of stored spans, and their slopes."""
    rows = []
    for size in sizes:
        store = folder / f"grown-{size}"
        if not store.exists():
            simulate(store, SMALL, SIMULATED_SMALL(0))
            with serving(store=store) as server:
                wait_until_ready(server, num_runs=1)
            if size < LARGE_STEP_SPANS:
                for number in range(1, size // SMALL_SPANS):
                    simulate(store, f"{SMALL}-{number}", SIMULATED_SMALL(number))
            else:
                simulate(store, LARGE, SIMULATED_LARGE(round(size / LARGE_STEP_SPANS)))
        # A process opens one embedded store.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            rows.append(pool.submit(measure_queries, store).result())
    logs = np.log10([row["num_spans"] for row in rows])
    slopes = {
        name: round(float(stats.linregress(logs, np.log10([row[name] for row in rows])).slope), 3)
        for name in rows[0]
        if name != "num_spans"
    }
    return {"sizes": rows, "slopes": slopes}


def measure_queries(folder: Path) -> dict[str, float]:
    """Return the median times of what pages ask a new provider for."""
    times = Samples()
    with open_store(f"chdb://{folder}") as store:
        runs = StoreSource(store).runs()
        (run,) = (run for run in runs if run.run_id == SMALL)
        for number in range(NUM_QUERIES):
            source = StoreSource(store)
            reports = Reports(source, stored=StoredReports(store))
            provider = StoreProvider(source, reports, store=store, timeout_s=TIMEOUT_S)
            with times.costing("overview", time.process_time):
                provider.runs()
                for ask in (provider.report, provider.strip, provider.silence, provider.kind_times):
                    ask(SMALL)
            step = 1 + number * (run.num_steps - 2) // NUM_QUERIES
            with times.costing("step", time.process_time):
                if provider.picture(SMALL, epoch=0, step=step, order=RowOrder.RANK) is None:
                    provider.timeline(SMALL, epoch=0, step=step)
    found = {name: round(statistics.median(values), 5) for name, values in times.values.items()}
    return {"num_spans": sum(each.num_spans for each in runs), **found}


if __name__ == "__main__":
    main()
