"""Some orders end a run. The worker then obeys them, and all that follow, in the order in which they came."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from headway.daemon.worker.inbox import WorkerInbox
from headway.daemon.worker.stage_records import StageRecords
from headway.daemon.worker.stage_worker import StageWorker
from headway.proto.control_pb2 import LayerSource, Order, Quit, Release, Report, StageAssignment, Start
from headway.stages.device.cpu import CpuDevice
from headway.stages.errors import AbortedError
from headway.stages.model import quantized
from headway.stages.spec import AdapterSpec, layer_names
from tests.unit.stages.stage.pipeline import CountingTokens, make_job


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
        collective=nothing,
        device=cast(Any, device),
        output=cast(Any, SimpleNamespace(restore=lambda: None)),
        records=StageRecords(folder, node="a", incarnation="i"),
    )


def serve(worker: StageWorker) -> tuple[list[str | None], int]:
    """Serve until Quit. Returns the kinds of the reports, and the number of batches."""
    told, batches = list[Report](), list[object]()
    control = SimpleNamespace(
        report=told.append, flush=lambda: None, progress=lambda _job, _generation, entry: batches.append(entry)
    )
    worker.serve(cast(Any, control))
    return [report.WhichOneof("report") for report in told], len(batches)


def test_release_and_then_quit_end_a_run_in_this_order(tmp_path: Path) -> None:
    """Both arrive while a stage computes: the job is released before the worker ends."""
    inbox = WorkerInbox()
    worker = make_worker(inbox, tmp_path)
    worker._run = cast(Any, object())
    inbox.put(Order(quit=Quit()))
    with pytest.raises(AbortedError, match="order release"):
        worker._take(Order(release=Release(job_name="j")))
    worker._run = None
    assert serve(worker) == (["released"], 0)
    assert inbox.empty()


def test_a_quit_behind_a_start_ends_the_new_run_before_its_first_batch(tmp_path: Path) -> None:
    """A second Start ends the first run. The Quit behind it must not wait until the second run is done."""
    job, inbox = make_job(), WorkerInbox()
    worker = make_worker(inbox, tmp_path)
    worker._session.did_prepare("tiny", 2, spec=job, tokens=cast(Any, CountingTokens()))
    layers = layer_names(job.model)
    for generation in (1, 2):
        start = Start(
            job_name="tiny",
            generation=generation,
            timeline=1,
            stage=StageAssignment(num_stages=1, layers=layers, depth=1),
            sources=[LayerSource(layer=layer, initial=True) for layer in layers],
        )
        inbox.put(Order(start=start))
    inbox.put(Order(quit=Quit()))
    assert serve(worker) == (["started", "started"], 0)
    assert inbox.empty()


def test_a_librarys_refusal_of_memory_ends_a_run_as_a_shortage(tmp_path: Path) -> None:
    """cuBLAS finds no room while a stage computes → the report has a shortage, and the worker lives on."""

    def run() -> None:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    worker, told = make_worker(WorkerInbox(), tmp_path), list[Report]()
    worker._report = cast(Any, told.append)  # type: ignore[method-assign]
    worker._compute(cast(Any, SimpleNamespace(loop=SimpleNamespace(run=run), executor=SimpleNamespace(batch=3))))
    assert [report.refused.HasField("shortage") for report in told] == [True]
    assert (told[0].refused.batch, told[0].refused.fault) == (3, "")


def test_a_package_that_is_missing_ends_the_job_at_its_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base in NF4 where bitsandbytes is missing: no other attempt follows, and the line has the command."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr(quantized, "_kernels", cast(Any, quantized._kernels).__wrapped__)
    job, worker, told = make_job(), make_worker(WorkerInbox(), tmp_path), list[Report]()
    job = replace(job, model=replace(job.model, adapter=AdapterSpec(rank=2, quantize="nf4")))
    worker._report = cast(Any, told.append)  # type: ignore[method-assign]
    worker._session.did_prepare("tiny", 1, spec=job, tokens=cast(Any, CountingTokens()))
    layers = layer_names(job.model)
    sources = [LayerSource(layer=layer, initial=True) for layer in layers]
    stage = StageAssignment(num_stages=1, layers=layers, depth=1)
    start = Start(job_name="tiny", generation=1, timeline=1, stage=stage, sources=sources)
    worker._obey(Order(start=start))
    assert [report.refused.hopeless for report in told] == [True]
    assert "needs bitsandbytes, which is not installed: `pip install 'headway[quantized]'`" in told[0].refused.reason
