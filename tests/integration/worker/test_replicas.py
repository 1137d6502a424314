"""Worker processes that share a stage: over real sockets, to the bits of the plain loop."""

import json
from pathlib import Path

import pytest

from headway.daemon.base.fault_points import ENVIRONMENT
from headway.daemon.jobs.job import FaultSpec
from headway.daemon.worker.goal import WrittenFile
from headway.stages.state.state_file import content_checksum
from tests.integration.worker.conftest import CaseMaker, FakeDaemon, Worker
from tests.rigs.worker import ONE_STAGE, assert_equals_reference

ALL, UPPER, MIDDLE, LOWER = ONE_STAGE[0], ("embed", "block.0"), ("block.1",), ("block.2", "head")
LAYOUTS = {
    "2": (ALL, ALL),
    "3": (ALL, ALL, ALL),
    "2-1-2": (UPPER, UPPER, MIDDLE, LOWER, LOWER),
    "2-3": ((*UPPER, *MIDDLE), (*UPPER, *MIDDLE), LOWER, LOWER, LOWER),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_number_of_replicas_gives_the_bits_of_the_plain_loop(
    five_workers: list[Worker], make_case: CaseMaker, layout: str
) -> None:
    """Two, three, 2-1-2 and 2-3 workers, with clipping → the reference's losses, and its weights on every replica."""
    cuts = LAYOUTS[layout]
    workers = five_workers[: len(cuts)]
    case = make_case(f"shared-{layout}", microbatches=8, reduction_groups=3)
    case.begin(1, cuts, workers)
    for worker in workers:
        worker.standing(1, case.spec.train.batches)
    files: dict[str, WrittenFile] = {}
    lead_of_last = cuts.index(cuts[-1])
    for position, worker in enumerate(workers):
        layers = [*cuts[position], *(["journal"] if position == lead_of_last else [])]
        for file in case.write(worker, case.spec.train.batches, layers):
            other = files.setdefault(file.layer, file)
            assert other.checksum == content_checksum(Path(file.path)) == file.checksum
    assert_equals_reference(case, workers[lead_of_last], list(files.values()))
    assert all(not worker.done for worker in workers if worker is not workers[lead_of_last])
    case.release(*workers)


def test_the_lead_of_the_first_stage_chooses_where_all_stop(five_workers: list[Worker], make_case: CaseMaker) -> None:
    """2-1-2 workers stop in the middle, then go on as 1-2 on what the leads have written and what is live."""
    case = make_case("shared-stop", batches=60, microbatches=6, reduction_groups=2)
    first = LAYOUTS["2-1-2"]
    case.begin(1, first, five_workers)
    lead, *others = five_workers
    five_workers[3].progress()
    lead.want(chooses_stop=True)
    boundary = lead.until(lambda: lead.actual.chosen, "a choice")
    assert 0 < boundary < case.spec.train.batches
    for worker in others:
        worker.want(stop_at=boundary)
    for worker in five_workers:
        worker.standing(1, boundary)
    paths: dict[str, str] = {}
    for position in (0, 2, 3):
        layers = [*first[position], *(["journal"] if position == 3 else [])]
        paths |= {file.layer: file.path for file in case.write(five_workers[position], boundary, layers)}
    second = ((*UPPER, *MIDDLE), LOWER, LOWER)
    workers = [five_workers[1], five_workers[3], five_workers[4]]
    case.begin(2, second, workers, boundary=boundary, paths=paths)
    end = case.spec.train.batches
    for worker in workers:
        worker.standing(2, end)
    files = case.write(workers[0], end, second[0]) + case.write(workers[1], end, [*LOWER, "journal"])
    assert_equals_reference(case, five_workers[3], files)
    case.release(*five_workers)


def test_a_replica_that_dies_is_named_by_its_sibling(
    mortal_daemon: FakeDaemon, make_case: CaseMaker, tmp_path: Path
) -> None:
    """The second of two is killed amid batch 3 → the first names it after the link's timeout, and can start again."""
    faults = tmp_path / "faults"
    when = {"generation": 1, "worker": 1, "batch": 3, "op": "backward"}
    faults.write_text(json.dumps({"id": "a", "at": "operation", "when": when, "do": "kill"}))
    pair = mortal_daemon.spawn(2, variables={ENVIRONMENT: str(faults)})
    case = make_case("shared-death", batches=9, reduction_groups=2, fault=FaultSpec(link_timeout_s=1.0))
    case.begin(1, (ALL, ALL), pair)
    failure = pair[0].failure(1)
    assert failure.text.startswith(f"stage 0 worker 1 at {pair[1].address}: ")
    assert (failure.fault, failure.lost_peer) == ("", 1)
    pair[0].done.clear()
    case.begin(2, ONE_STAGE, pair[:1], timeline=2)
    end = pair[0].standing(2, 9)
    assert_equals_reference(case, pair[0], case.write(pair[0], end, [*case.spec.layers, "journal"]))
    case.release(pair[0])
