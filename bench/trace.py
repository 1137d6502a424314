"""What it costs that `headway trace` can be asked at any time: per operation of a worker, and per question.

record_ns: to remember one operation, the call included; a call that does nothing, measured in turns, is beside it.
tell_ms: to put a full memory into the answer, in a thread that shares the processor with the computation.

Processor time, in turns, medians; the shortest operations of real models take some hundred microseconds.
"""

import argparse
import sys
import time

from rigs.measure import Figure, alternate, report
from rigs.pipeline_processes import Operations

from headway.daemon.worker.stage_records import StageRecords
from headway.proto.control_pb2 import StageAssignment, Start
from headway.stages.schedule.schedule import Forward, Op
from headway.stages.stage.observer import StageObserver
from headway.stages.telemetry.goodput import Goodput
from headway.stages.telemetry.recent_ops import NUM_KEPT


class Nothing(Operations):
    """Forgets."""

    def ended(self, op: Op, *, version: int, num_versions_live: int, started: float, ended: float) -> None: ...


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds, for a first look")
    options = parser.parse_args()
    num_ops, num_pairs = 200_000, 5 if options.quick else 25
    records = StageRecords(None, node="bench", incarnation="bench")
    records.begin(Start(job_name="bench", generation=1, stage=StageAssignment(index=0, num_stages=1)))
    remembering, nothing = records.observer(Goodput(), lambda _: None), Nothing()
    ops = [Forward(batch, 0) for batch in range(1000)]

    def ns_of(observer: StageObserver) -> float:
        """One call, of so many."""
        began = time.process_time()
        for _ in range(num_ops // len(ops)):
            for op in ops:
                observer.ended(op, version=1, num_versions_live=2, started=time.perf_counter(), ended=1.0)
        return (time.process_time() - began) / num_ops * 1e9

    pairs = alternate(num_pairs, lambda: ns_of(remembering), lambda: ns_of(nothing))
    told_ms = []
    for request in range(num_pairs):
        began = time.process_time()
        assert len(records.recent(request).SerializeToString()) > NUM_KEPT
        told_ms.append((time.process_time() - began) * 1e3)
    figures = {
        "record_ns": Figure.of([ours for ours, _ in pairs]),
        "empty_call_ns": Figure.of([theirs for _, theirs in pairs]),
        "tell_ms": Figure.of(told_ms),
    }
    return report(f"A memory of {NUM_KEPT} operations", figures)


if __name__ == "__main__":
    sys.exit(main())
