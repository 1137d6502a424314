"""Memory of every worker of a plan on a card: predicted over measured, by the cases of bench/memory.py.

num_missed: workers whose prediction is off by more than the bench allows. On a CPU the bench counts storages itself.
"""

import argparse
import json
import sys

from memory import CASES, counted, on_card


def measure(device: str) -> dict[str, object]:
    """Every case, one worker at a time."""
    rows = [row for case in CASES for row in (counted(case) if device == "cpu" else on_card(case))]
    ratios = [row.ratio for row in rows]
    return {
        "num_missed": sum(not row.holds for row in rows),
        "predicted_vs_measured_least": round(min(ratios), 4),
        "predicted_vs_measured_most": round(max(ratios), 4),
        "missed": [f"{row.case}, {row.worker}: {row.ratio:.3f}" for row in rows if not row.holds],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    print(json.dumps(measure(options.device)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
