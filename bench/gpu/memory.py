"""Memory of a one-stage job on a card: what plans count with, over the most that torch allocated, feature by feature.

On a CPU nothing counts allocations, so its rows are skipped; the runs are the same.
"""

import argparse
import json
import sys
from dataclasses import replace

from rigs.pipeline_processes import Processes, StageReport, StageRun

from gpu.sizes import first_device, stage_model, stage_train
from headway.daemon.costs.layer_costs import layer_costs
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.optim.spec import OptimSpec
from headway.stages.spec import ModelSpec, TrainSpec, layer_names

BATCHES = 3
FEATURES: dict[str, dict[str, object]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16_recomputed": {"dtype": "bfloat16", "recompute": "block"},
    "bfloat16_groups": {"dtype": "bfloat16", "reduction_groups": 4},
}


def predicted_bytes(model: ModelSpec, train: TrainSpec, depth: int) -> int:
    """Return the bytes that a plan counts for the whole model on one device."""
    spec = JobSpec(job=JobSection(name="memory", seed=1), model=model, train=train)
    costs = layer_costs(spec)
    needed = sum(cost.resident_bytes + depth * cost.activation_bytes for cost in costs)
    needed += sum(train.reduction_groups * cost.group_bytes for cost in costs)
    return round(needed + max(cost.passing_bytes for cost in costs))


def measure(device: str) -> dict[str, object]:
    """Each feature in a process of its own, because a peak is a process's."""
    model = stage_model(device)
    figures: dict[str, object] = {}
    ratios = []
    for name, fields in FEATURES.items():
        dtype = str(fields["dtype"])
        train = replace(stage_train(device, batches=BATCHES, dtype=dtype), **fields)  # type: ignore[arg-type]
        with Processes(1, environment={}) as processes:
            run = StageRun(
                job=processes.new_name(), model=model, train=train, optim=OptimSpec(), cuts=[layer_names(model)],
                device=device,
            )  # fmt: skip
            (report,) = processes.run(run, number=1)
        assert isinstance(report, StageReport)
        predicted = predicted_bytes(model, train, run.depth(0))
        figures[f"{name}_predicted_bytes"], figures[f"{name}_peak_bytes"] = predicted, report.peak_bytes
        if report.peak_bytes:
            ratios.append(predicted / report.peak_bytes)
            figures[f"{name}_predicted_vs_measured"] = round(ratios[-1], 4)
    for end, of in (("least", min), ("most", max)):
        key = f"predicted_vs_measured_{end}"
        figures[key] = round(of(ratios), 4) if ratios else None
        figures |= {} if ratios else {f"{key}_reason": "torch counts no allocations on a CPU"}
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    print(json.dumps(measure(first_device(options.device))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
