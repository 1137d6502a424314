"""The stall of an evaluation: what a pipeline takes beside the forwards of its held-out microbatches.

own_compute_2bw, own_compute_1f1b: the seconds that batches should take, over those that they take. A batch should take
what it does without evaluation, and its held-out forwards on one stage. 1: no stage waits for an evaluation.

Stages are emulated, 20 ms a forward and 40 ms a backward, and all else is real: links, frames, schedule and journal.
Every second batch of 8 microbatches begins with an evaluation of as many. Both sides run in turns.
"""

import argparse
import sys
from dataclasses import replace

from rigs.emulated_stage import SleepTimes
from rigs.measure import Figure, alternate, report
from rigs.pipeline_processes import Processes, StageRun

from headway.optim.spec import GroupSpec, OptimSpec
from headway.stages.spec import ModelSpec, ScheduleName, TrainSpec, layer_names

NUM_STAGES, EVERY = 4, 2
SETTLING, MEASURED = 2, 6
"""Batches; the measured ones are whole periods. The last one of a run is left out: the pipe drains."""
SCHEDULES: tuple[ScheduleName, ...] = ("2bw", "1f1b")
MODEL = ModelSpec(
    num_hidden_layers=NUM_STAGES - 2,
    hidden_size=8,
    intermediate_size=8,
    num_attention_heads=1,
    num_key_value_heads=1,
    vocab_size=8,
)
SGD = GroupSpec(name="sgd", lr=1e-3)
OPTIM = OptimSpec(matrices=SGD, rest=SGD, error_feedback=0.0, lr_schedule="constant", warmup_batches=0)
SLEEPS = SleepTimes(forward_s=0.020, backward_s=0.040, update_s=0.010)
TRAIN = TrainSpec(batches=SETTLING + MEASURED + 1, microbatches=8, microbatch_size=1, sequence_length=8)


def batch_s(processes: Processes, train: TrainSpec) -> float:
    """Return the seconds of a batch, the mean of the measured ones, by the last stage's clock."""
    run = StageRun(
        job=processes.new_name(),
        model=MODEL,
        train=train,
        optim=OPTIM,
        cuts=[(name,) for name in layer_names(MODEL)],
        sleeps=SLEEPS,
    )
    ends = processes.run(run, number=NUM_STAGES)[-1].batch_ends()
    return float(ends[SETTLING + MEASURED - 1] - ends[SETTLING - 1]) / MEASURED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="half a minute: 2bw, two pairs")
    options = parser.parse_args()
    figures: dict[str, Figure] = {}
    with Processes(NUM_STAGES) as processes:
        for schedule in SCHEDULES[: 1 if options.quick else None]:
            plain = replace(TRAIN, schedule=schedule)
            evaluated = replace(plain, eval_every=EVERY)
            held_out_s = evaluated.evaluated_share * plain.microbatches * SLEEPS.forward_s
            pairs = alternate(
                2 if options.quick else 7,
                lambda train=evaluated: batch_s(processes, train),  # type: ignore[misc]
                lambda train=plain: batch_s(processes, train),  # type: ignore[misc]
            )
            figures[f"own_compute_{schedule}"] = Figure.of([(theirs + held_out_s) / ours for ours, theirs in pairs])
    return report("What an evaluation costs beside its own forwards", figures)


if __name__ == "__main__":
    sys.exit(main())
