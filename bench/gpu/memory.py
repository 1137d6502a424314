"""Memory of every worker of a plan on a card: predicted over measured, by the cases of bench/memory.py in bfloat16.

num_missed: workers whose prediction is off by more than the bench allows. On a CPU the bench counts storages itself; of
the first cases here, of all by `bench/memory.py`.
"""

import sys

from memory import CASES, counted, fits_card, on_card

from gpu.probe import Parts

NUM_ON_CPU = 8


def measure(device: str) -> Parts:
    """Every case that the device can have, one worker at a time."""
    cases = CASES[:NUM_ON_CPU] if device == "cpu" else [case for case in CASES if fits_card(case)]
    rows = []
    for case in cases:
        rows += counted(case) if device == "cpu" else on_card(case)
        print(f"{case.name}: {rows[-1].ratio:.3f}", file=sys.stderr, flush=True)
    ratios = [row.ratio for row in rows]
    yield {
        "num_missed": sum(not row.holds for row in rows),
        "predicted_vs_measured_least": round(min(ratios), 4),
        "predicted_vs_measured_most": round(max(ratios), 4),
        "missed": [
            f"{row.case}, {row.worker}: {row.ratio:.3f} of {row.measured_bytes}" for row in rows if not row.holds
        ],
    }
