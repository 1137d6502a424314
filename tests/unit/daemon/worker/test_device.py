"""What a worker does about a device that cannot be measured."""

import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headway.daemon.cluster.measurements import DeviceSpeed
from headway.daemon.jobs.job import JobSpec
from headway.daemon.worker import device as module
from headway.daemon.worker.device import WorkerDevice, warm_up_layers
from headway.optim.step_count import STEPS
from headway.stages.device.cpu import CpuDevice
from headway.stages.state.journal import Journal
from tests.rigs.pipeline import TRAIN, Pipeline, initial_layers, make_job


def test_a_device_that_has_no_memory_left_to_be_measured_stays_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else's process fills it just now: the speed is unknown, nothing fails, and it is not tried again."""

    def fail(_: torch.device) -> DeviceSpeed:
        raise torch.OutOfMemoryError("out of memory\nadvice")

    monkeypatch.setattr(module, "measure_speed", fail)
    device = WorkerDevice("cpu", is_to_be_measured=True)
    device.measure()
    assert (device.speed, device.is_to_be_measured) == (DeviceSpeed(), False)


@pytest.mark.parametrize(("num_sharers", "told"), [(1, []), (4, [0.25])])
def test_a_worker_on_a_shared_card_keeps_to_its_part_of_the_memory(
    num_sharers: int, told: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch is told the fraction before anything is allocated; a card of its own has no limit."""
    fractions: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, _: fractions.append(part))
    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: place)
    moved: list[str] = []
    monkeypatch.setattr(module, "move_near", moved.append)
    assert WorkerDevice("cuda", num_sharers=num_sharers).claim(0) == torch.device("cuda", 0)
    assert fractions == told
    assert moved == ["0000:1b:00.0"]


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


VIEWS = {"aten.slice.Tensor", "aten.view.default"}
OF_THE_HOST = {"aten.randint.generator", "aten.clone.default", "aten.lift_fresh.default"}
"""What makes up tokens, and numbers of the host."""


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations of a thread, each with the dtype of its first tensor: on a card each pair is code of its own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: set[tuple[str, str]] = set()

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        tensors = (each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor))
        self.seen.add((str(func), str(next((tensor.dtype for tensor in tensors), None))))
        return func(*args, **(kwargs or {}))


def test_no_operation_of_a_run_is_the_first_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches in bfloat16 with clipping, Error Feedback and evaluation → all that computes was warmed up before.

    Code that a card loads in the middle of a run would wait for transfers, and they for what comes after it.
    """
    about = {"reduction_groups": 2, "clip_norm": 0.5, "eval_every": 2, "eval_microbatches": 2, "loss_chunk": 8}
    job = make_job(replace(TRAIN, dtype="bfloat16", **about))  # type: ignore[arg-type]
    with Operations() as warmed:
        assert len(list(warm_up_layers(("embed", "block.1", "head"), job, CpuDevice()))) == 3
    used: set[tuple[str, str]] = set()
    run = threading.Thread.run

    def noted(thread: threading.Thread) -> None:
        with Operations() as operations:
            run(thread)
        used.update(operations.seen)

    monkeypatch.setattr(threading.Thread, "run", noted)
    Pipeline(job, initial_layers(job), Journal(), num_stages=3).run()
    assert ("aten._foreach_add_.List", "torch.float32") in used
    assert {name for name, _ in used - warmed.seen} <= VIEWS | OF_THE_HOST


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


CODE = """
import sys
import torch
from headway.daemon.worker.stage_worker import StageWorker
from headway.daemon.worker.device import warm_up
from headway.optim.layer_optimizer import inner_optimizer
from headway.optim.spec import OPTIMIZERS, GroupSpec

warm_up()
for name in OPTIMIZERS:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    optimizer = inner_optimizer(GroupSpec(name=name, lr=0.1, precondition_frequency=1), [weight])
    for _ in range(2):
        optimizer.step()
    assert not torch.equal(weight, torch.ones(2, 2)), name
assert torch.are_deterministic_algorithms_enabled()
print(*sorted(sys.modules.keys() & {"torch._dynamo", "torch._inductor", "sympy"}))
"""


def test_no_compiler_is_imported_by_a_job_that_is_not_compiled() -> None:
    """One batch, then two steps of every optimizer: torch's compiler, a second of every worker's start, stays away."""
    ended = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == ""
