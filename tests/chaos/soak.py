"""`make soak`: jobs under hundreds of random faults from recorded seeds, each compared bit for bit with the plain loop.

    python -m tests.chaos.soak --seed 1 --jobs 10 --minutes 30 --keep /var/tmp/soak

Prints a line per fault and a table; the last line is JSON. A failing case leaves its state folder in --keep; the same
--seed with --jobs 1 strikes the same faults again.
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from tests.chaos.outages import kinds_of
from tests.chaos.soak_job import KINDS, Outcome, SoakCase, soak
from tests.integration.exactness.training import Oracle

HEAD = ("seed", "nodes", "schedule", "faults", "plans", "median s", "worst s", "recomputed", "seconds", "verdict")
JOB_SECONDS = 75.0
RATE_PER_MINUTE = 20.0
BATCHES = 600


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """The command line. Exits with 2 on a wrong one."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of the first job; the next ones follow")
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=45.0, help="no further job is begun after so long")
    parser.add_argument("--keep", type=Path, default=None, help="folder for the state of failing cases")
    parser.add_argument("--batches", type=int, default=BATCHES)
    parser.add_argument("--rate", type=float, default=RATE_PER_MINUTE, help="faults per minute")
    parser.add_argument(
        "--faults", type=kinds_of, default=KINDS, help="kinds, as of `headway chaos`; all but partition"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where all jobs compute")
    parser.add_argument("--keep-all", action="store_true", help="keep the state of the others too")
    parser.add_argument("--quiet", action="store_true", help="no line per fault")
    return parser.parse_args(arguments)


async def main(options: argparse.Namespace) -> int:
    """Run the cases one after the other. Returns 0, or 1 when any had trouble."""
    deadline = time.monotonic() + 60.0 * options.minutes
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        oracle = Oracle(Path(scratch), device=options.device)
        for seed in range(options.seed, options.seed + options.jobs):
            if time.monotonic() >= deadline:
                break
            case = SoakCase.of(seed, duration_s=JOB_SECONDS, batches=options.batches, rate_per_minute=options.rate)
            case = replace(case, kinds=options.faults, device=options.device)
            folder = (options.keep or Path(scratch)).absolute() / case.name
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            say(f"seed {seed}: {case.num_nodes} nodes, {case.schedule}, {case.batches} batches")
            outcome = await soak(case, folder, oracle, say=_nothing if options.quiet else say)
            outcomes.append(outcome)
            for trouble in outcome.troubles:
                say(f"  TROUBLE {trouble}")
            if not outcome.troubles and not options.keep_all:
                shutil.rmtree(folder, ignore_errors=True)
    print_table(outcomes)
    return 1 if any(outcome.troubles for outcome in outcomes) else 0


def print_table(outcomes: list[Outcome]) -> None:
    """The table, then one line of JSON."""
    rows = [HEAD, *(outcome.row() for outcome in outcomes)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    for row in rows:
        say("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    kinds: dict[str, int] = {}
    for outcome in outcomes:
        for blow in outcome.blows:
            kinds[blow.kind] = kinds.get(blow.kind, 0) + 1
    recoveries = sorted(seconds for outcome in outcomes for seconds in outcome.recoveries_s)
    summary = {
        "soak": "passed" if outcomes and not any(outcome.troubles for outcome in outcomes) else "failed",
        "seeds": [outcome.case.seed for outcome in outcomes],
        "failing_seeds": [outcome.case.seed for outcome in outcomes if outcome.troubles],
        "num_failing": sum(bool(outcome.troubles) for outcome in outcomes),
        "divergences": _count(outcomes, "AssertionError"),
        "hangs": _count(outcomes, "hang: ", "no progress was seen", "did not leave in time"),
        "leaks": _count(outcomes, " is left", "more files are open"),
        "faults": sum(kinds.values()),
        "by_kind": dict(sorted(kinds.items())),
        "plans": sum(outcome.num_generations for outcome in outcomes),
        "recomputed_batches": sum(blow.recomputed for outcome in outcomes for blow in outcome.blows),
        "median_recovery_s": round(recoveries[len(recoveries) // 2], 3) if recoveries else None,
        "worst_recovery_s": round(recoveries[-1], 3) if recoveries else None,
        "minutes": round(sum(outcome.seconds for outcome in outcomes) / 60.0, 1),
        "num_cpus": os.cpu_count(),
    }
    say(json.dumps(summary))


def _count(outcomes: list[Outcome], *marks: str) -> int:
    """Jobs with such a trouble."""
    return sum(any(mark in trouble for trouble in outcome.troubles for mark in marks) for outcome in outcomes)


def say(text: str) -> None:
    """A line on stdout, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _nothing(_: str) -> None:
    return


if __name__ == "__main__":
    sys.exit(asyncio.run(main(parse_arguments(sys.argv[1:]))))
