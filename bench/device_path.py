"""How long a device stands still because of copies: three stages, copies that take half as long as computing.

idle_share_first, _middle, _last: share of the compute stream's time in steady state in which it computes nothing.
blocking_first, _middle, _last: the same with copies that run in the compute stream, for which the stage's thread waits.

The device is emulated: each stream is a clock, and computing and copying take set times. All that the host does is
real: the executor, its loop, the threads of the device, the queues between the stages.
"""

import argparse
import contextlib
import io
import sys
from collections.abc import Sequence

from rigs.measure import Figure, progress, report
from rigs.timed_stage import Times, run_stages
from rigs.timed_streams import Computed

from headway.stages.spec import ModelSpec, TrainSpec

PLACES = ("first", "middle", "last")
FORWARD_S = 0.02
TIMES = Times(forward_s=FORWARD_S, backward_s=FORWARD_S, update_s=FORWARD_S / 2, copy_s=FORWARD_S / 2)
BAR = 0.02
SETTLING = 2
"""Batches at either end of a run that do not count: the pipe fills and drains."""
MODEL = ModelSpec(
    num_hidden_layers=4,
    hidden_size=64,
    intermediate_size=64,
    num_attention_heads=1,
    num_key_value_heads=1,
    vocab_size=64,
)


def idle_share(computed: Sequence[Computed], batches: range) -> float:
    """Return the share of the time from the first to the last operation of these batches without any operation."""
    counted = [one for one in computed if one.op.batch in batches]
    begin, end = min(one.begin for one in counted), max(one.end for one in counted)
    busy = sum(max(0.0, min(one.end, end) - max(one.begin, begin)) for one in computed)
    return 1 - busy / (end - begin)


def idle_shares(num_batches: int, *, is_blocking: bool) -> list[float]:
    """Run once; return the idle share of each stage."""
    train = TrainSpec(
        schedule="2bw", batches=num_batches, microbatches=8, microbatch_size=8, sequence_length=64, clip_norm=1.0
    )
    runs = run_stages(MODEL, train, TIMES, num_stages=len(PLACES), is_blocking=is_blocking)
    return [idle_share(computed, range(SETTLING, num_batches - SETTLING)) for computed in runs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short run of each design")
    parser.add_argument("--json", action="store_true", help="print the JSON line alone")
    options = parser.parse_args()
    num_runs, num_batches = (1, 8) if options.quick else (5, 10)
    shares: dict[str, list[float]] = {}
    for run in range(num_runs):
        for name, is_blocking in (("idle_share", False), ("blocking", True)):
            found = idle_shares(num_batches, is_blocking=is_blocking)
            progress(f"run {run + 1} of {num_runs}: {name} " + ", ".join(f"{share:.4f}" for share in found))
            for place, share in zip(PLACES, found, strict=True):
                shares.setdefault(f"{name}_{place}", []).append(share)
    figures = {name: Figure.of(values) for name, values in shares.items()}
    extra: dict[str, object] = {"copy_over_compute": TIMES.copy_s / TIMES.forward_s, "bar": BAR}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        report("Time in which a device computes nothing", figures, extra=extra)
    print(said.getvalue().splitlines()[-1] if options.json else said.getvalue().rstrip())
    return int(any(figures[f"idle_share_{place}"].median > BAR for place in PLACES))


if __name__ == "__main__":
    sys.exit(main())
