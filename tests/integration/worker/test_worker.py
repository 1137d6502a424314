"""A worker process from its hello to its end, driven by goals over a real socket."""

import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from headway.daemon.jobs.job import DataSpec, FaultSpec
from headway.daemon.local.reference_loop import BatchResult, reference
from headway.optim.spec import GroupSpec, OptimSpec
from headway.stages.data.tokens import TokenShards
from headway.stages.errors import NonFiniteLossError
from headway.stages.state.state_file import read_state
from tests.integration.worker.conftest import MODEL, CaseMaker, FakeDaemon, Worker, wait_for_death
from tests.rigs.worker import ONE_STAGE, TWO_STAGES


def test_a_stage_waits_for_a_neighbour_that_loads_for_long(workers: list[Worker], make_case: CaseMaker) -> None:
    """Both neighbours, in turn, start when a link that was there once would long have been given up."""
    case = make_case("slow-start", fault=FaultSpec(link_timeout_s=0.2))
    for generation, late in ((1, 0), (2, 1)):
        for index, worker in enumerate(workers):
            case.prepared(worker, generation, index, TWO_STAGES)
        for index in (1 - late, late):
            worker = workers[index]
            worker.want(start=case.start(generation, index, TWO_STAGES, workers))
            worker.until(lambda k=index, g=generation: workers[k].actual.generation == g, "started")  # type: ignore[misc]
            time.sleep(0.6)
        for worker in workers:
            worker.standing(generation, case.spec.train.batches)
    case.release(*workers)


def test_another_job_of_the_same_name_gets_its_own_data(workers: list[Worker], make_case: CaseMaker) -> None:
    """The daemon saw a job removed and submitted anew at once, and released nobody between: open data is not kept."""
    case, worker = make_case("renewed"), workers[0]
    case.prepared(worker, 1, 0, ONE_STAGE)
    renewed = replace(case.spec, data=DataSpec(source="/nowhere", sha256="0" * 64))
    other = replace(case, spec=renewed, data=Path("/nowhere"))
    other.prepare(worker, 2, 0, ONE_STAGE)
    assert "/nowhere" in worker.failure(2).text
    case.release(worker)


def test_what_is_impossible_fails_its_generation_in_one_line(workers: list[Worker], make_case: CaseMaker) -> None:
    """Each goal that does not fit gets its reason; the worker goes on with the next generation."""
    case, worker = make_case("refused"), workers[0]
    case.prepare(worker, 1, 0, (("embed", "block.9"),))
    assert "no layer 'block.9'" in worker.failure(1).text
    replace(case, data=Path("/nowhere")).prepare(worker, 2, 0, ONE_STAGE)
    assert "shards.json" in worker.failure(2).text
    case.prepared(worker, 3, 0, ONE_STAGE)
    worker.want(start=case.start(3, 0, ONE_STAGE, workers, boundary=4))
    assert worker.failure(3).text == "start: layer embed is not held here"
    case.prepared(worker, 4, 0, ONE_STAGE)
    worker.want(start=case.start(4, 0, ONE_STAGE, workers, paths={"block.1": "/nowhere.safetensors"}))
    worker.until(lambda: worker.actual.num_damaged == 1, "a refused file")
    assert (worker.actual.damaged_path, 4 in worker.actual.failures) == ("/nowhere.safetensors", False)
    worker.want(start=case.start(4, 0, ONE_STAGE, workers, num_damaged=1))
    worker.standing(4, 10)
    case.prepare(worker, 5, 0, ONE_STAGE, start=case.start(4, 0, ONE_STAGE, workers), stop_at=9, write=("head",))
    worker.until(lambda: worker.actual.prepared == 5, "ready")
    assert worker.actual.written == ()
    case.release(worker)


def test_a_newer_start_and_a_release_end_a_run(workers: list[Worker], make_case: CaseMaker) -> None:
    """Goals reach a worker between two operations: another generation while it runs, then no job."""
    case, worker = make_case("aborted", batches=100_000), workers[0]
    case.begin(1, ONE_STAGE, workers)
    worker.progress()
    case.begin(2, ONE_STAGE, workers)
    worker.until(lambda: worker.done and worker.done[-1][0] == 2, "a batch of the second generation")
    case.release(worker)


def test_another_job_is_served_after_the_first_is_let_go(workers: list[Worker], make_case: CaseMaker) -> None:
    """One goal in place of the other: the worker releases the first job by itself."""
    first, second, worker = make_case("before", batches=100_000), make_case("after"), workers[0]
    first.begin(1, ONE_STAGE, workers)
    second.prepared(worker, 7, 0, ONE_STAGE, start=None)
    assert (worker.actual.job, worker.actual.generation) == ("after", 0)
    second.release(worker)


def test_a_loss_that_is_not_finite_ends_the_run_or_counts_like_any_other(
    workers: list[Worker], make_case: CaseMaker
) -> None:
    """A learning rate of 1e30: there is no hope, the batch is named; or it goes on like the plain loop."""
    sgd = GroupSpec(name="sgd", lr=1e30, weight_decay=0.0)
    optim = OptimSpec(matrices=sgd, rest=sgd, warmup_batches=0)
    case, worker = make_case("diverged", optim=optim, clip_norm=0.0), workers[0]
    case.begin(1, ONE_STAGE, workers)
    failure = worker.failure(1)
    assert failure.text.startswith(f"the loss of batch {failure.batch}, ")
    assert failure.is_hopeless
    assert failure.fault.startswith("NonFiniteLossError: the loss of batch #")
    tokens, before = TokenShards.open(case.data), list[BatchResult]()
    with pytest.raises(NonFiniteLossError, match=failure.text):
        reference(case.spec, tokens, on_batch=before.append)
    assert len(before) == failure.batch
    case.release(worker)

    worker.done.clear()
    case = make_case("undaunted", optim=optim, clip_norm=0.0, fault=FaultSpec(non_finite="continue"))
    case.begin(1, ONE_STAGE, workers)
    worker.standing(1, case.spec.train.batches)
    results: list[BatchResult] = []
    reference(case.spec, tokens, on_batch=results.append)
    assert not all(math.isfinite(row.loss) for row in results)
    assert [str(done.loss) for _, done in worker.done] == [str(row.loss) for row in results]
    case.release(worker)


@pytest.mark.slow
def test_each_way_to_lose_a_worker(mortal_daemon: FakeDaemon, make_case: CaseMaker) -> None:
    """A raising layer leaves its traceback, a killed neighbour is named, and no worker outlives its daemon's socket.

    Three workers: the first's data has tokens beyond its model's vocabulary; the second and third are neighbours, the
    third is killed in the middle of a run; the first is replaced by none, and the second loses its daemon.
    """
    doomed, survivor, victim = mortal_daemon.spawn(3)
    small = make_case("small-vocabulary", model=replace(MODEL, vocab_size=8))
    small.prepared(doomed, 1, 0, ONE_STAGE)
    doomed.want(start=small.start(1, 0, ONE_STAGE, [doomed]))
    pair = make_case("pair", batches=100_000)
    pair.begin(1, TWO_STAGES, [survivor, victim])
    victim.progress()
    victim.process.kill()
    assert survivor.failure(1).text.startswith(f"stage 1 at {victim.address}: ")

    told = doomed.until(lambda: doomed.actual.dies_of, "its last words")
    assert doomed.actual.generation == 1
    assert told.fault.startswith("IndexError: ")
    assert (told.batch, told.is_hopeless) == (0, False)
    assert doomed.process.wait(30) != 0
    assert "IndexError" in doomed.error_file.read_text()

    again = make_case("again", batches=100_000)
    pair.release(survivor)
    again.begin(1, ONE_STAGE, [survivor])
    survivor.progress()
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
    """The journal is trimmed, and the rest is written."""
    case, worker = make_case("trimmed"), workers[0]
    end = case.spec.train.batches
    case.begin(1, ONE_STAGE, workers)
    worker.standing(1)
    worker.want(journal_from=2)
    worker.until(lambda: worker.actual.journal_from == 2, "a trimmed journal")
    [file] = case.write(worker, end, ["journal"])
    assert read_state(Path(file.path))[1]["batch"].tolist() == list(range(2, end))
    case.release(worker)


def test_a_file_that_was_lost_is_written_again(workers: list[Worker], make_case: CaseMaker) -> None:
    """It is wanted, not wanted because the daemon has it, and wanted once more."""
    case, worker = make_case("twice"), workers[0]
    case.begin(1, ONE_STAGE, workers)
    end = worker.standing(1)
    first = case.write(worker, end, ["head"])
    worker.want(write=())
    worker.until(lambda: not worker.actual.written, "nothing is wanted")
    assert case.write(worker, end, ["head"]) == first
    case.release(worker)
