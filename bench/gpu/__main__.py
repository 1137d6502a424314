"""`make gpu`: everything that only a card can show, as one table and one JSON file.

Needs at least one CUDA device; without one it says so and exits with 2. A probe that fails, hangs or dies fills its
rows with its reason, and the next one runs. The exit status is 1 if any row missed its bar or failed.

--device cpu runs the same code on this machine's CPU with small sizes, and is patient. Its figures say nothing of a
card, so only the bars of exactness count.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gpu.card_facts import CHANGING, card_facts
from gpu.probes import PROBES, Probe, chosen
from gpu.rows import JudgedRow, as_records, is_all_well, judge, table
from gpu.run_probe import run_probe

ROOT = Path(__file__).resolve().parents[2]
NO_CARD = 2
PATIENCE = {"cuda": 1.0, "cpu": 6.0}
"""Factor of the probes' limits: a small machine with other work takes long to compile."""


def card_names() -> tuple[str, ...]:
    """Return the names of this machine's cards, as far as torch can use them."""
    import torch

    return tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def measure(probes: Sequence[Probe], *, device: str, logs: Path) -> tuple[list[JudgedRow], dict[str, object]]:
    """Run the probes one after the other; return all rows, and each probe's figures. What it printed lies in `logs`."""
    logs.mkdir(parents=True, exist_ok=True)
    paths = [str(ROOT), str(ROOT / "bench")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    judged: list[JudgedRow] = []
    figures: dict[str, object] = {}
    for number, probe in enumerate(probes, 1):
        command = [sys.executable, *probe.arguments, "--device", device, *(probe.on_cpu if device == "cpu" else ())]
        limit_s, log = PATIENCE[device] * probe.limit_s, logs / f"{probe.name}.log"
        print(f"{number} of {len(probes)}: {probe.name}, at most {limit_s:g} s", file=sys.stderr, flush=True)
        result = run_probe(command, limit_s=limit_s, environment=environment, log=log, folder=ROOT)
        rows = [judge(row.on(device), result) for row in probe.rows]
        figures[probe.name] = {"seconds": round(result.seconds, 1), **result.figures}
        for row in rows:
            value = "-" if row.value is None else f"{row.value:.4g}"
            print(f"    {row.row.name}: {value} {row.verdict} {row.reason}", file=sys.stderr, flush=True)
        judged += rows
    return judged, figures


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="gpu", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", default=[], choices=[probe.name for probe in PROBES], metavar="PROBE")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="folder for report.json and logs")
    options = parser.parse_args(arguments)
    cards = card_names()
    if options.device == "cuda" and not cards:
        from headway.stages.no_card import why_no_card

        hint = 'GPU="--device cpu" runs the same code on the CPU'
        print(f"make gpu: no CUDA device: {why_no_card()}; make gpu {hint}", file=sys.stderr)
        return NO_CARD
    from rigs.measure import machine, versions

    began, facts = time.monotonic(), card_facts()
    judged, figures = measure(chosen(options.only), device=options.device, logs=options.out)
    body = {
        "rows": as_records(judged),
        "figures": figures,
        "card": facts,
        "card_afterwards": card_facts(CHANGING),
        "device": options.device,
        "cards": cards,
        "seconds": round(time.monotonic() - began, 1),
        "machine": machine(),
        "versions": versions(),
    }
    path = options.out / "report.json"
    path.write_text(json.dumps(body, indent=1) + "\n")
    where = ", ".join(sorted(set(cards))) if options.device == "cuda" else "the CPU, which says nothing of a card"
    said = "\n".join(f"{name}: {text}" for name, text in facts.items())
    print(
        f"\nOn {where}\n{said}\n\n{table(judged)}\n\n{path}: all figures; beside it each probe's output",
        flush=True,
    )
    return 0 if is_all_well(judged) else 1


if __name__ == "__main__":
    sys.exit(main())
