"""Some goals end a run. The worker then goes on to the newest one."""

import queue
import sys
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from headway.daemon.cluster.measurements import LayerTime, MemoryShortage
from headway.daemon.jobs.job import JobSpec, PluginsSpec
from headway.daemon.worker.goal import Action, Actual, FromWorker, Goal, Preparation, Source, SourceKind, Start
from headway.daemon.worker.held_layers import Held, RefusedError
from headway.daemon.worker.neighbours import Neighbours, WorkerInbox
from headway.daemon.worker.stage_records import StageRecords
from headway.daemon.worker.stage_worker import StageWorker
from headway.stages.data.shard_writer import DataForm, writing_shards
from headway.stages.device.cpu import CpuDevice
from headway.stages.errors import AbortedError
from headway.stages.model import quantized
from headway.stages.spec import AdapterSpec, layer_names
from headway.stages.state.snapshot_writer import SnapshotWriter
from tests.rigs.agent_views import WHOLE, plan
from tests.rigs.pipeline import CountingTokens, make_job


def make_worker(inbox: WorkerInbox, folder: Path) -> StageWorker:
    """A worker without links and without a process of its own."""
    nothing = cast(Any, None)
    device = SimpleNamespace(
        is_to_be_measured=False,
        release_memory=lambda: None,
        device=torch.device("cpu"),
        open=lambda **_: CpuDevice(),
    )
    return StageWorker(
        inbox=inbox,
        endpoint=nothing,
        on_stuck=nothing,
        device=cast(Any, device),
        output=cast(Any, SimpleNamespace(restore=lambda: None)),
        records=StageRecords(folder, node="a", incarnation="i"),
    )


class Told:
    """A control that remembers what the worker tells."""

    def __init__(self) -> None:
        self.actuals: list[Actual] = []
        self.num_batches = 0

    def tell(self, message: FromWorker) -> None:
        if isinstance(message, Actual):
            self.actuals.append(message)

    def progress(self, *_: object) -> None:
        self.num_batches += 1

    def flush(self) -> None:
        """Nothing is under way."""


def started(generation: int) -> Goal:
    """The goal to compute the whole of a tiny job."""
    layers = layer_names(make_job().model)
    whole = plan(generation, ("a", layers))
    sources = tuple(Source(layer, SourceKind.INITIAL) for layer in layers)
    return Goal(job="tiny", spec=make_job(), start=Start(plan=whole, position=0, sources=sources))


def prepared(worker: StageWorker, job: JobSpec, generation: int) -> Told:
    """The worker is ready for a generation. Returns what it tells from now on."""
    told = Told()
    worker._control = cast(Any, told)
    worker._goal, worker._actual = Goal(job="tiny"), Actual(job="tiny", prepared=generation)
    worker._held = Held(spec=job, tokens=cast(Any, CountingTokens()))
    return told


def test_a_release_ends_a_run_and_is_done_after_it(tmp_path: Path) -> None:
    """It arrives while a stage computes: the run is cut off, and the job is let go before the process ends."""
    inbox = WorkerInbox()
    worker = make_worker(inbox, tmp_path)
    told = prepared(worker, make_job(), 2)
    worker._run = cast(Any, object())
    with pytest.raises(AbortedError, match="let its job go"):
        worker._take(Goal())
    worker._run = None
    inbox.put(Goal(ends=True))
    worker.serve(cast(Any, told))
    assert [actual.job for actual in told.actuals] == [""]


def test_an_end_behind_a_start_ends_the_new_run_before_its_first_batch(tmp_path: Path) -> None:
    """A second start ends the first run. The end behind it must not wait until the second run is done."""
    inbox = WorkerInbox()
    worker = make_worker(inbox, tmp_path)
    told = prepared(worker, make_job(), 2)
    for generation in (1, 2):
        inbox.put(started(generation))
    inbox.put(Goal(ends=True))
    worker.serve(cast(Any, told))
    assert ([actual.generation for actual in told.actuals], told.num_batches) == ([1, 2], 0)
    assert inbox.empty()


def test_a_librarys_refusal_of_memory_ends_a_run_as_a_shortage(tmp_path: Path) -> None:
    """cuBLAS finds no room while a stage computes → the failure has a shortage, and the worker lives on."""

    def run() -> None:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    worker = make_worker(WorkerInbox(), tmp_path)
    told = prepared(worker, make_job(), 1)
    worker._compute(cast(Any, SimpleNamespace(loop=SimpleNamespace(run=run), executor=SimpleNamespace(batch=3))))
    [failure] = told.actuals[-1].failures.values()
    assert (failure.shortage, failure.batch, failure.fault) == (MemoryShortage(), 3, "")


def test_a_package_that_is_missing_ends_the_job_at_its_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base in NF4 where bitsandbytes is missing: no other attempt follows, and the line has the command."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr(quantized, "_kernels", cast(Any, quantized._kernels).__wrapped__)
    job, worker = make_job(), make_worker(WorkerInbox(), tmp_path)
    job = replace(job, model=replace(job.model, adapter=AdapterSpec(rank=2, quantize="nf4")))
    told = prepared(worker, job, 1)
    worker._goal = started(1)
    worker._act(Action.START)
    failure = told.actuals[-1].failures[1]
    assert failure.is_hopeless
    assert "needs bitsandbytes, which is not installed: `pip install 'headway[quantized]'`" in failure.text


def test_a_write_is_refused_while_the_snapshot_writer_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the writer continues, it deletes the files of its cancelled snapshot by name."""
    monkeypatch.setattr(SnapshotWriter, "cancel", lambda _self, **_: False)
    nothing = cast(Any, None)
    worker = StageWorker(
        inbox=SimpleQueue(),
        endpoint=nothing,
        on_stuck=nothing,
        device=nothing,
        output=nothing,
        records=StageRecords(None, node="a", incarnation="i"),
    )
    worker._goal = Goal(job="j", start=Start(plan=WHOLE, position=0), stop_at=4, write=("head",))
    worker._actual, worker._held = Actual(job="j", generation=1, boundary=4), Held(spec=make_job())
    with pytest.raises(RefusedError, match="has not let go"):
        worker._do(Action.WRITE)


def test_a_link_that_no_position_is_known_of_is_left_out() -> None:
    """The heartbeat is written while links are opened."""
    found = Neighbours(cast(Any, None), queue.SimpleQueue(), print)
    found._links = [cast(Any, SimpleNamespace(peer=name, broken_at=1.0, is_over=False)) for name in ("b", "c")]
    found._positions = {"b": 1}
    assert found.broken == [1]


def test_a_card_may_be_late_by_the_work_that_it_was_given() -> None:
    """Its links allow for that: a batch as planned, and what was timed as soon as there is something."""
    timed: dict[str, LayerTime] = {}
    found = Neighbours(cast(Any, None), queue.SimpleQueue(), print, lambda: timed)
    start = Start(plan=replace(WHOLE, predicted_batch_seconds=3.0), position=0)
    assert found._launched_s(start, make_job()) == 12.0
    for kind in ("embed", "block", "head"):
        timed[kind] = LayerTime(forward_s=1.0, backward_s=2.0, update_s=4.0)
    num_layers = len(start.layers)
    assert found._launched_s(start, make_job()) == 4.0 * num_layers * (2 * 3.0 + 4.0)


def test_a_first_preparation_that_fails_is_told_of_its_job(tmp_path: Path) -> None:
    """The worker has served nothing yet, and cannot import the job's code: its daemon learns whose worker failed, and
    that another machine may do better.
    """
    wheel = PluginsSpec(wheel="no_such.py", sha256="1" * 64)
    job, worker, told = replace(make_job(), plugins=wheel), make_worker(WorkerInbox(), tmp_path), Told()
    with writing_shards(tmp_path / "wheel", DataForm(vocab_size=256)) as writer:
        writer.append(np.zeros(8, np.uint8))
    worker._control = cast(Any, told)
    cast(Any, worker._device).claim = lambda _: CpuDevice()
    whole = plan(1, ("a", layer_names(job.model)))
    prepare = Preparation(plan=whole, position=0, plugins_path=str(tmp_path / "wheel"))
    worker._goal = Goal(job="tiny", spec=job, prepare=prepare)
    worker._act(Action.PREPARE)
    last = told.actuals[-1]
    assert (last.job, last.failures[1].refuses_plugins, last.failures[1].is_hopeless) == ("tiny", True, False)
    assert "plug-in no_such.py: the file in" in last.failures[1].text
