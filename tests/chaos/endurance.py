"""`make endurance`: one job under many random faults, compared with the plain loop by one SHA-256 of its weights.

    python -m tests.chaos.endurance --faults 1000 --mean 15 --keep /var/tmp/endurance

The job is paused after the last fault, and compared with a plain loop that ends at the same batch. Prints a line per
fault and a report. Goodput is the share of time in which new batches came: every gap between two new
batches counts as lost as far as it is longer than two typical gaps. A node that is away makes the others' batches
slower and no gap longer, so machines that are away are not counted.
"""

import argparse
import asyncio
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from tests.chaos.outages import kinds_of
from tests.chaos.residue import Residue
from tests.chaos.soak import say
from tests.chaos.soak_job import KINDS, Outcome, SoakCase, last_warnings, overdue_leaves, train_under_faults
from tests.integration.exactness.training import Oracle, Result, assert_same_bits

TYPICAL_GAPS = 2.0


@dataclass(frozen=True, slots=True)
class Goodput:
    """Share of a job's time that brought new batches."""

    seconds: float
    lost_s: float
    typical_gap_s: float

    @property
    def share(self) -> float:
        """0 to 1."""
        return 1.0 - self.lost_s / self.seconds if self.seconds else 0.0


def goodput(progress: Sequence[tuple[float, int]]) -> Goodput:
    """progress: (seconds, batch) of each sight of a new batch."""
    gaps = [later - earlier for (earlier, _), (later, _) in pairwise(progress)]
    typical_s = median(gaps) if gaps else 0.0
    lost_s = sum(max(0.0, gap - TYPICAL_GAPS * typical_s) for gap in gaps)
    return Goodput(sum(gaps), lost_s, typical_s)


def digest(result: Result) -> str:
    """SHA-256 of all losses and of the bytes of all weights, in order of their names."""
    found = hashlib.sha256(json.dumps(result.losses).encode())
    for name, tensor in sorted(result.weights.items()):
        found.update(name.encode())
        found.update(bytes(tensor.contiguous().untyped_storage()))
    return found.hexdigest()


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """The command line. Exits with 2 on a wrong one."""
    parser = argparse.ArgumentParser(
        prog="endurance", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--mean", type=float, default=15.0, help="seconds between two faults")
    parser.add_argument("--batches", type=int, default=1_000_000, help="of the job, which outlasts the faults")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--layer-s", type=float, default=0.004, help="least seconds of a layer's forward")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", type=kinds_of, default=KINDS, help="as of `headway chaos --faults`")
    parser.add_argument("--keep", type=Path, default=None, help="folder for the run's state, kept on trouble")
    return parser.parse_args(arguments)


async def main(options: argparse.Namespace) -> int:
    """Run the job, then the plain loop. Returns 0, or 1 when anything was wrong."""
    case = SoakCase(
        seed=options.seed,
        num_nodes=options.nodes,
        batches=options.batches,
        duration_s=options.faults * options.mean,
        rate_per_minute=60.0 / options.mean,
        schedule="2bw",
        reduction_groups=1,
        clip_norm=0.5,
        kinds=options.kinds,
        layer_s=options.layer_s,
        is_paused_at_end=True,
        has_history=False,
    )
    spec, outcome = case.spec(), Outcome(case=case)
    with tempfile.TemporaryDirectory(prefix="endurance-") as scratch:
        folder = (options.keep or Path(scratch)).absolute() / case.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        residue, began = Residue(folder), time.monotonic()
        result = await train_under_faults(case, spec, folder, outcome, [], [], say)
        outcome.seconds = time.monotonic() - began
        outcome.troubles += overdue_leaves(folder / "state")
        if outcome.troubles:
            outcome.troubles += last_warnings(folder / "state")
        outcome.troubles += await residue.found()
        digests = {}
        if result is not None:
            say("the plain loop computes the same job")
            plain = Oracle(Path(scratch))(spec, stop_at=len(result.losses))
            digests = {"headway": digest(result), "reference": digest(plain)}
            try:
                assert_same_bits(result, plain)
            except AssertionError as error:
                outcome.troubles.append(f"the bits differ: {str(error)[:500]}")
        report(outcome, result, digests, goodput(outcome.progress))
        if not outcome.troubles and options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if outcome.troubles else 0


def report(outcome: Outcome, result: Result | None, digests: dict[str, str], found: Goodput) -> None:
    """One document."""
    kinds: dict[str, int] = {}
    for blow in outcome.blows:
        kinds[blow.kind] = kinds.get(blow.kind, 0) + 1
    recoveries = sorted(outcome.recoveries_s)
    document = {
        "endurance": "failed" if outcome.troubles else "passed",
        "sha256": digests,
        "faults": len(outcome.blows),
        "by_kind": dict(sorted(kinds.items())),
        "goodput": round(found.share, 4),
        "lost_s": round(found.lost_s, 1),
        "seconds_with_progress_seen": round(found.seconds, 1),
        "typical_gap_s": round(found.typical_gap_s, 3),
        "batches": len(result.losses) if result is not None else None,
        "recomputed_batches": sum(blow.recomputed for blow in outcome.blows),
        "new_generations": len({blow.new_generation for blow in outcome.blows if blow.new_generation is not None}),
        "median_recovery_s": round(median(recoveries), 2) if recoveries else None,
        "worst_recovery_s": round(recoveries[-1], 2) if recoveries else None,
        "minutes": round(outcome.seconds / 60.0, 1),
        "num_cpus": os.cpu_count(),
        "troubles": outcome.troubles,
    }
    say(json.dumps(document, indent=2))


if __name__ == "__main__":
    sys.exit(asyncio.run(main(parse_arguments(sys.argv[1:]))))
