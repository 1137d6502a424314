"""What `headway plan` says of the examples for cards: tokens/s, the cards that work, and the fullest card and machine.

Beside the plan of a job's own file stand those with blocks computed again everywhere and with a loss of 512 rows at a
time, and with `[fault] copies = 1`. It prints the table of docs/placement.md. Nothing is measured here.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from rigs.measure import progress

from headway.daemon.base.errors import ConfigError
from headway.daemon.client.nodes_file import parse_nodes
from headway.daemon.client.preview import preview
from headway.daemon.jobs.job_file import read_job_file
from headway.daemon.plan.cluster_plan import ClusterPlan, size

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples"
MACHINES = {"8xh100": "8 × H100", "mixed-cards": "2 × H100, 4 × 4090, 2 × L40S", "32xh100": "32 × H100"}
CASES = (
    *((job, nodes) for nodes in ("8xh100", "mixed-cards") for job in ("8b-2k", "8b-8k", "large")),
    *((job, "32xh100") for job in ("8b-8k", "70b-4k")),
)
VARIANTS: tuple[Mapping[str, object], ...] = ({}, {"train.recompute": "block"}, {"train.loss_chunk": 512})
HEAD = (
    '| job | on | tokens/s | `recompute = "block"` | `loss_chunk = 512` | cards | fullest card | fullest machine |',
    "|---|---|---|---|---|---|---|---|",
)


def planned(job: str, nodes: str, changes: Mapping[str, object]) -> tuple[float, ClusterPlan] | None:
    """Return tokens/s and the plan of an example on an example's machines; None: it does not fit."""
    spec, named = read_job_file(EXAMPLES / f"{job}.toml")[:2]
    found = parse_nodes((EXAMPLES / f"{nodes}.toml").read_text(encoding="utf-8"), nodes)
    changed = spec.with_values(dict(changes))
    try:
        told = preview(
            changed,
            found.records(changed.train),
            named=frozenset({*named, *changes}),
            links=found.link_assumptions(),
            has_data=False,
        )[0]
    except ConfigError:
        return None
    return told.tokens_per_second, told.plan


def row(job: str, nodes: str) -> str:
    """Return a row of the table."""
    plans = [planned(job, nodes, changes) for changes in VARIANTS]
    rates = ["refused" if plan is None else f"{plan[0]:,.0f}" for plan in plans]
    if plans[0] is None:
        return f"| {job} | {MACHINES[nodes]} | {' | '.join(rates)} | | | |"
    estimates = plans[0][1].estimates
    card = max(estimates, key=lambda each: each.device_bytes / max(each.device_limit_bytes, 1))
    host = max(estimates, key=lambda each: each.host_bytes / max(each.host_limit_bytes, 1))
    return (
        f"| {job} | {MACHINES[nodes]} | {' | '.join(rates)} | {len(estimates)} | "
        f"{size(card.device_bytes)} of {size(card.device_limit_bytes)} | "
        f"{size(host.host_bytes)} of {size(host.host_limit_bytes)} |"
    )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="jobs whose name has this part")
    options = parser.parse_args()
    rows = []
    for job, nodes in CASES:
        if options.only in job:
            progress(f"{job} on {nodes}")
            rows.append(row(job, nodes))
    print("\n".join((*HEAD, *rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
