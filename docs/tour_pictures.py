"""Make the pictures of docs/tour.md: a server, two simulated runs, a headless Chromium.

`make pictures` runs it. Each picture has 48 colours and half of the size on the screen.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from rankscope.commands.simulate import simulate_run
from rankscope.simulation import SimulateOptions

FOLDER = Path(__file__).parent / "images" / "tour"
PAGES = {
    "rank": "/rank?run=llm-7b&rank=5",
    "mfu": "/mfu?run=llm-7b",
    "links": "/links?run=llm-7b",
    "graph": "/graph?run=llm-7b&step=13",
    "what-if": "/what-if?run=llm-7b",
    "compare": "/compare?run=llm-7b&with=llm-7b-before",
    "incident": "/run/llm-7b/incident/0",
    "health": "/health",
    "runs": "/runs",
}
SIZE = {"width": 1200, "height": 800}
NUM_COLORS = 48
TIMEOUT_S = 180
SETTLED = """() => {
  const main = document.querySelector('main');
  return main.querySelectorAll('h1, h2, table').length
    && !/in progress|being (analysed|read|replayed)|Reading the run/.test(main.innerText);
}"""


def shoot(page: Page, address: str) -> bytes:
    """Return a small picture of a page, once it shows its results."""
    page.goto(address, wait_until="load")
    page.wait_for_function(SETTLED, timeout=TIMEOUT_S * 1000)
    page.wait_for_timeout(4000)
    picture = Image.open(BytesIO(page.screenshot())).convert("RGB")
    small = picture.resize(
        (SIZE["width"] * 3 // 4, SIZE["height"] * 3 // 4), Image.Resampling.LANCZOS
    )
    out = BytesIO()
    small.quantize(NUM_COLORS, dither=Image.Dither.NONE).save(out, "png", optimize=True)
    return out.getvalue()


def main(names: list[str]) -> None:
    """Write the pictures of the given pages, or of all."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        url = f"chdb://{folder}/store"
        for run, faults in {
            "llm-7b-before": (),
            "llm-7b": ("slow-compute:rank=5,factor=1.8,steps=10-29",),
        }.items():
            simulate_run(
                SimulateOptions(
                    scenario="healthy",
                    run_id=run,
                    num_ranks=8,
                    num_steps=40,
                    seed=5,
                    faults=faults,
                    store_url=url,
                )
            )
        serve = [sys.executable, "-m", "rankscope", "serve", "--store", url]
        server = subprocess.Popen(serve)
        try:
            state = Path(folder) / "store" / "server.json"
            while not state.exists():
                time.sleep(0.2)
            known = json.loads(state.read_text())
            with sync_playwright() as playwright:
                chromium = playwright.chromium.launch(
                    executable_path=shutil.which("chromium"), args=["--no-sandbox"]
                )
                page = chromium.new_page(viewport=SIZE)
                page.goto(f"{known['url']}/?token={known['token']}")
                for name in names or PAGES:
                    made = shoot(page, known["url"] + PAGES[name])
                    (FOLDER / f"{name}.png").write_bytes(made)
                    print(f"{name}: {len(made):,} bytes")
                chromium.close()
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
