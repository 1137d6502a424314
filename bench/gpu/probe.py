"""Runs one probe: `python -m gpu.probe NAME --device KIND`.

It prints all figures again as each part of them comes. The last line counts, so what is measured stays if a later part
fails or hangs.
"""

import argparse
import importlib
import json
import sys
import traceback
from collections.abc import Iterator

from gpu.run_probe import DIED

Figures = dict[str, object]
"""Of a probe, by the keys of its rows. None: this machine cannot have it, and `KEY_reason` says why."""
Parts = Iterator[Figures]


def absent(reason: str, *keys: str) -> Figures:
    """Return figures that this machine cannot have."""
    return {name: value for key in keys for name, value in ((key, None), (f"{key}_reason", reason))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="a module of this folder with a function `measure`")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    figures: Figures = {}
    try:
        for part in importlib.import_module(f"gpu.{options.name}").measure(options.device):
            figures |= part
            print(json.dumps(figures), flush=True)
    except Exception:
        traceback.print_exc()
        return DIED
    return 0


if __name__ == "__main__":
    sys.exit(main())
