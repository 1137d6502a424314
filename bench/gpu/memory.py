"""Memory of every worker of a plan on a card: predicted over measured, by the cases of bench/memory.py in bfloat16.

num_missed: workers whose prediction is off by more than the bench allows. On a CPU the bench counts storages itself.
"""

import argparse
import json
import sys

from memory import CASES, counted, fits_card, on_card


def measure(device: str) -> dict[str, object]:
    """Every case that the device can have, one worker at a time."""
    cases = CASES if device == "cpu" else [case for case in CASES if fits_card(case)]
    rows = []
    for case in cases:
        rows += counted(case) if device == "cpu" else on_card(case)
        print(f"{case.name}: {rows[-1].ratio:.3f}", file=sys.stderr, flush=True)
    ratios = [row.ratio for row in rows]
    return {
        "num_missed": sum(not row.holds for row in rows),
        "predicted_vs_measured_least": round(min(ratios), 4),
        "predicted_vs_measured_most": round(max(ratios), 4),
        "missed": [
            f"{row.case}, {row.worker}: {row.ratio:.3f} of {row.measured_bytes}" for row in rows if not row.holds
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    print(json.dumps(measure(options.device)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
