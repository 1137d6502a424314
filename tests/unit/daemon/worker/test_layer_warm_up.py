"""First operations are paid before a stage runs, and leave no trace in what it computes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from headway.daemon.jobs.job import JobSpec
from headway.daemon.worker import device as module
from headway.daemon.worker.device import WorkerDevice, warm_up_layers
from headway.optim.step_count import STEPS
from headway.stages.device.cpu import CpuDevice
from tests.unit.stages.stage.pipeline import TRAIN, make_job

JOB = make_job(TRAIN)
LAYERS = ("block.1", "block.2", "head")


def unheard(error: BaseException) -> None:
    """No thread of a device fails here."""
    raise error


def test_each_kind_of_a_stage_is_trained_once() -> None:
    """Two blocks and the head → a block and the head, with an update of each, and no random number is drawn."""
    generator, steps = torch.get_rng_state(), STEPS.num_done
    kinds = [kind for kind, seconds in warm_up_layers(LAYERS, JOB, CpuDevice()) if seconds > 0]
    assert sorted(kinds) == ["block", "head"]
    assert STEPS.num_done > steps
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_stage_warms_up_with_tokens(dtype: str) -> None:
    """Embedding and block, in both dtypes of jobs."""
    job = make_job(replace(TRAIN, dtype=dtype))  # type: ignore[arg-type]
    assert sorted(kind for kind, _ in warm_up_layers(("embed", "block.0"), job, CpuDevice())) == ["block", "embed"]


def warmed(monkeypatch: pytest.MonkeyPatch, kind: str, *, error: Exception | None = None) -> list[JobSpec]:
    """The jobs for which a device of a kind warms up when it is told three times: twice one job, then another."""
    calls: list[JobSpec] = []

    def record(_layers: object, spec: JobSpec, _device: object) -> Any:
        calls.append(spec)
        if error is not None:
            raise error
        return iter(())

    monkeypatch.setattr(module, "warm_up_layers", record)
    device = WorkerDevice(kind)
    for job in (JOB, JOB, make_job(TRAIN, seed=JOB.job.seed)):
        device.warm_up(LAYERS, job, on_failure=unheard)
    return calls


def test_a_card_warms_up_once_per_shapes_and_a_cpu_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same job again, and a job of the same shapes, cost nothing."""
    assert warmed(monkeypatch, "cuda") == [JOB]
    assert warmed(monkeypatch, "cpu") == []


def test_a_card_without_room_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage pays for its first operations itself."""
    assert warmed(monkeypatch, "cuda", error=torch.OutOfMemoryError("no room")) == [JOB]
    assert warmed(monkeypatch, "cuda", error=RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")) == [JOB]
