"""Write the JSON dumps of a folder as the pickles that PyTorch's analyzer reads.

    python read_flight_recorder.py FOLDER; torchfrtrace FOLDER/pickles -p rank_

The analyzer looks a group up by the name that its entries have, which the dump of a gloo job lists
under another one. With `--as-written` the names stay, and the analyzer ends with a KeyError.
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "pickles").mkdir(exist_ok=True)
    for path in folder.glob("rank_*.json"):
        dump = json.loads(path.read_text())
        if "--as-written" not in sys.argv:
            names = {entry["process_group"][0] for entry in dump["entries"]}
            ranks = str(list(range(4)))
            dump["pg_config"] = {
                name: {"name": name, "desc": "default_pg", "ranks": ranks} for name in names
            }
        (folder / "pickles" / path.stem).write_bytes(pickle.dumps(dump))
