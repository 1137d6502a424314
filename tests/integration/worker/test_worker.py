"""A worker process from its hello to its end, driven by orders over a real socket."""

import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headway.daemon.jobs.job import DataSpec, FaultSpec
from headway.daemon.records.format import encode
from headway.daemon.reference.loop import BatchResult, reference
from headway.optim.spec import GroupSpec, OptimSpec
from headway.proto import control_pb2
from headway.stages.data.tokens import TokenShards
from headway.stages.errors import NonFiniteLossError
from headway.stages.state.state_file import content_checksum, read_state
from tests.integration.worker.conftest import MODEL, Case, CaseMaker, FakeDaemon, Worker, wait_for_death

ONE_STAGE = (("embed", "block.0", "block.1", "block.2", "head"),)
TWO_STAGES = (("embed", "block.0"), ("block.1", "block.2", "head"))
RECUT = (("embed", "block.0", "block.1"), ("block.2", "head"))


def assert_equals_reference(case: Case, worker: Worker, wrote: list[control_pb2.WrittenFile]) -> None:
    """Every batch's loss once, and every weight in the files, bit for bit those of the plain loop."""
    results: list[BatchResult] = []
    weights = reference(case.spec, TokenShards.open(case.data), on_batch=results.append)
    assert [(entry.batch, entry.loss) for entry in worker.entries] == [(row.batch, row.loss) for row in results]
    files = {file.layer: file for file in wrote}
    assert files.keys() == {*case.spec.layers, "journal"}
    for file in files.values():
        path = Path(file.path)
        assert (path.stat().st_size, content_checksum(path)) == (file.size_bytes, file.checksum)
    for layer, expected in weights.items():
        _, tensors = read_state(Path(files[layer].path))
        for name, tensor in expected.items():
            assert torch.equal(tensors[f"current/{name}"], tensor), f"{layer}/{name}"


def refusal(worker: Worker, **order: object) -> str:
    """The reason that a worker gives for not obeying."""
    worker.order(**order)
    reason: str = worker.expect("refused").reason
    return reason


def test_one_stage_runs_a_job_to_its_end(workers: list[Worker], make_case: CaseMaker) -> None:
    """Prepare, Start, the last boundary, Write, Release: losses and weights are those of the plain loop."""
    case, worker = make_case("one-stage"), workers[0]
    case.begin(1, ONE_STAGE, workers)
    assert worker.expect("at_boundary").boundary == case.spec.train.batches
    wrote = case.write(worker, 1, case.spec.train.batches, [*case.spec.layers, "journal"])
    assert_equals_reference(case, worker, list(wrote.files))
    case.release(worker)
    assert '"stage_started"' in (case.directory / "one-stage.log").read_text()


@pytest.mark.slow
def test_two_stages_stop_and_are_cut_anew(workers: list[Worker], make_case: CaseMaker) -> None:
    """A stop in the middle moves block.1 to the other worker; nothing is lost, repeated or changed by a bit."""
    case = make_case("recut", batches=150)
    upper, lower = workers
    case.begin(1, TWO_STAGES, workers)
    lower.expect("progress")
    upper.order(choose_stop=control_pb2.ChooseStop(job_name=case.name, generation=1))
    boundary = upper.expect("stop_chosen").boundary
    assert 0 < boundary < case.spec.train.batches
    lower.order(stop_at=control_pb2.StopAt(job_name=case.name, generation=1, boundary=boundary))
    assert upper.expect("at_boundary").boundary == lower.expect("at_boundary").boundary == boundary
    moved = {file.layer: file.path for file in case.write(lower, 1, boundary, ["block.1"]).files}
    case.begin(2, RECUT, workers, boundary=boundary, paths=moved)
    for worker in workers:
        assert worker.expect("at_boundary").boundary == case.spec.train.batches
    files = list(case.write(upper, 2, case.spec.train.batches, RECUT[0]).files)
    files += case.write(lower, 2, case.spec.train.batches, [*RECUT[1], "journal"]).files
    assert_equals_reference(case, lower, files)
    assert [entry.generation for entry in lower.entries] == [1] * boundary + [2] * (150 - boundary)
    case.release(*workers)


def test_a_stage_waits_for_a_neighbour_that_loads_for_long(workers: list[Worker], make_case: CaseMaker) -> None:
    """Both neighbours, in turn, start when a link that was there once would long have been given up."""
    case = make_case("slow-start", fault=FaultSpec(link_timeout_s=0.2))
    for generation, late in ((1, 0), (2, 1)):
        for index, worker in enumerate(workers):
            worker.order(prepare=case.prepare(generation, index, TWO_STAGES))
            worker.expect("prepared")
        for index in (1 - late, late):
            workers[index].order(start=case.start(generation, index, TWO_STAGES, workers))
            workers[index].expect("started")
            time.sleep(0.6)
        for worker in workers:
            assert worker.expect("at_boundary").boundary == case.spec.train.batches
    case.release(*workers)


def test_another_job_of_the_same_name_gets_its_own_data(workers: list[Worker], make_case: CaseMaker) -> None:
    """The daemon saw a job removed and submitted anew at once, and released nobody between: open data is not kept."""
    case, worker = make_case("renewed"), workers[0]
    worker.order(prepare=case.prepare(1, 0, ONE_STAGE))
    worker.expect("prepared")
    renewed = encode(replace(case.spec, data=DataSpec(source="/nowhere", sha256="0" * 64)))
    assert "/nowhere" in refusal(worker, prepare=case.prepare(2, 0, ONE_STAGE, job=renewed, data_paths=["/nowhere"]))
    case.release(worker)


def test_impossible_orders_are_refused_in_one_line(workers: list[Worker], make_case: CaseMaker) -> None:
    """Each order that does not fit gets its reason; the worker goes on and does what fits."""
    case, worker = make_case("refused"), workers[0]
    prepare, start = case.prepare(2, 0, ONE_STAGE), case.start(2, 0, ONE_STAGE, workers)
    assert "was not prepared here" in refusal(worker, start=start)
    assert "spec cannot be read" in refusal(worker, prepare=case.prepare(2, 0, ONE_STAGE, job=b"{"))
    assert "no layer 'block.9'" in refusal(worker, prepare=case.prepare(2, 0, (("embed", "block.9"),)))
    assert "shards.json" in refusal(worker, prepare=case.prepare(2, 0, ONE_STAGE, data_paths=["/nowhere"]))
    worker.order(prepare=prepare)
    worker.expect("prepared")
    missing = case.start(2, 0, ONE_STAGE, workers, paths={"block.1": "/nowhere.safetensors"})
    assert "/nowhere.safetensors" in refusal(worker, start=missing)
    assert "layer embed is not held here" in refusal(worker, start=case.start(2, 0, ONE_STAGE, workers, boundary=4))
    worker.order(start=start)
    worker.expect("started")
    worker.expect("at_boundary")
    assert "generation 1 of job refused has ended" in refusal(worker, prepare=case.prepare(1, 0, ONE_STAGE))
    stale = control_pb2.StopAt(job_name=case.name, generation=1, boundary=10)
    assert "generation 1 of job refused has ended; the worker runs 2" in refusal(worker, stop_at=stale)
    early = control_pb2.Write(
        job_name=case.name, generation=2, timeline=1, boundary=9, layers=["head"], directory=str(case.directory)
    )
    assert "at boundary 10, not at 9" in refusal(worker, write=early)
    assert "serves job refused" in refusal(worker, prepare=make_case("other").prepare(1, 0, ONE_STAGE))
    assert "serves job refused" in refusal(worker, release=control_pb2.Release(job_name="other"))
    case.release(worker)


def test_a_newer_start_and_a_release_end_a_run(workers: list[Worker], make_case: CaseMaker) -> None:
    """Orders reach a worker between two operations: Prepare while it runs, then Start anew, then Release."""
    case, worker = make_case("aborted", batches=100_000), workers[0]
    case.begin(1, ONE_STAGE, workers)
    worker.expect("progress")
    case.begin(2, ONE_STAGE, workers)
    while worker.expect("progress").generation != 2:
        pass
    case.release(worker)


def test_a_loss_that_is_not_finite_ends_the_run_or_counts_like_any_other(
    workers: list[Worker], make_case: CaseMaker
) -> None:
    """A learning rate of 1e30: there is no hope, the batch is named; or it goes on like the plain loop."""
    sgd = GroupSpec(name="sgd", lr=1e30, weight_decay=0.0)
    optim = OptimSpec(matrices=sgd, rest=sgd, warmup_batches=0)
    case, worker = make_case("diverged", optim=optim, clip_norm=0.0), workers[0]
    case.begin(1, ONE_STAGE, workers)
    refused = worker.expect("refused")
    assert refused.reason.startswith(f"the loss of batch {refused.batch}, ")
    assert refused.hopeless
    assert refused.fault.startswith("NonFiniteLossError: the loss of batch #")
    tokens, before = TokenShards.open(case.data), list[BatchResult]()
    with pytest.raises(NonFiniteLossError, match=refused.reason):
        reference(case.spec, tokens, on_batch=before.append)
    assert len(before) == refused.batch
    case.release(worker)

    worker.entries.clear()
    case = make_case("undaunted", optim=optim, clip_norm=0.0, fault=FaultSpec(non_finite="continue"))
    case.begin(1, ONE_STAGE, workers)
    assert worker.expect("at_boundary").boundary == case.spec.train.batches
    results: list[BatchResult] = []
    reference(case.spec, tokens, on_batch=results.append)
    assert not all(math.isfinite(row.loss) for row in results)
    assert [str(entry.loss) for entry in worker.entries] == [str(row.loss) for row in results]
    case.release(worker)


@pytest.mark.slow
def test_each_way_to_lose_a_worker(mortal_daemon: FakeDaemon, make_case: CaseMaker) -> None:
    """A raising layer leaves its traceback, a killed neighbour is named, and no worker outlives its daemon's socket.

    Three workers: the first's data has tokens beyond its model's vocabulary; the second and third are neighbours, the
    third is killed in the middle of a run; the first is replaced by none, and the second loses its daemon.
    """
    doomed, survivor, victim = mortal_daemon.spawn(3)
    small = make_case("small-vocabulary", model=replace(MODEL, vocab_size=8))
    doomed.order(prepare=small.prepare(1, 0, ONE_STAGE))
    doomed.expect("prepared")
    doomed.order(start=small.start(1, 0, ONE_STAGE, [doomed]))
    pair = make_case("pair", batches=100_000)
    pair.begin(1, TWO_STAGES, [survivor, victim])
    victim.expect("progress")
    victim.process.kill()
    refused = survivor.expect("refused")
    assert refused.reason.startswith(f"stage 1 at {victim.address}: ")

    assert doomed.expect("started").generation == 1
    told = doomed.expect("refused")
    assert told.fault.startswith("IndexError: ")
    assert (told.batch, told.hopeless) == (0, False)
    assert doomed.process.wait(30) != 0
    assert "IndexError" in doomed.error_file.read_text()

    again = make_case("again", batches=100_000)
    pair.release(survivor)
    again.begin(1, ONE_STAGE, [survivor])
    survivor.expect("progress")
    mortal_daemon.stop_serving()
    assert wait_for_death(survivor.process.pid, timeout_s=30) < 20


def test_a_worker_dies_with_the_process_that_started_it(daemon: FakeDaemon, make_case: CaseMaker) -> None:
    """The socket still serves, but the process that spawned the worker is killed: the kernel kills the worker."""
    script = "import subprocess, sys, time; subprocess.Popen(sys.argv[1:]); time.sleep(120)"
    parent = subprocess.Popen(
        [sys.executable, "-c", script, *daemon.command(0)], env={**os.environ, "PYTHONSAFEPATH": "1"}
    )
    daemon.processes.append(parent)
    pid = daemon.next_attached().hello.pid
    assert pid != parent.pid
    os.kill(pid, signal.SIGINT)  # a worker takes no notice of Ctrl-C
    parent.kill()
    assert wait_for_death(pid, timeout_s=30) < 20


def test_rows_that_durable_storage_has_leave_the_journal(workers: list[Worker], make_case: CaseMaker) -> None:
    """The journal is trimmed, also by orders about another generation: those change nothing. The next one goes on."""
    case, worker = make_case("trimmed"), workers[0]
    end = case.spec.train.batches
    case.begin(1, ONE_STAGE, workers)
    worker.expect("at_boundary")
    for generation, boundary in ((1, 2), (7, end)):
        trim = control_pb2.TrimJournal(job_name=case.name, generation=generation, boundary=boundary)
        worker.order(trim_journal=trim)
    [file] = case.write(worker, 1, end, ["journal"]).files
    assert read_state(Path(file.path))[1]["batch"].tolist() == list(range(2, end))
    case.release(worker)
