"""The blocks of a small model as one stage, and the bytes that their microbatches keep alive."""

import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headway.daemon.jobs.job import JobSpec
from headway.stages.ids import LayerName
from headway.stages.spec import ModelSpec, TrainSpec
from headway.stages.stage.graph import StageGraph
from headway.stages.state.layer_state import LayerState
from tests.rigs.pipeline import factory_of

MODEL = ModelSpec(
    num_hidden_layers=4,
    hidden_size=32,
    intermediate_size=88,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=64,
)
TRAIN = TrainSpec(microbatches=8, microbatch_size=2, sequence_length=32, clip_norm=0.0)
NUM_IN_FLIGHT = 3


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the storages that operations in this context made and that are alive, autograd's own included."""

    def __init__(self, others: Iterable[Tensor]) -> None:
        """others: what was there before, of which operations give views."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in others}

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        made = func(*args, **(kwargs or {}))  # type: ignore[arg-type]
        for tensor in made if isinstance(made, tuple) else (made,):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        return made

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address, num_bytes = storage._cdata, storage.nbytes()
        if address in self._known:
            return
        self._known.add(address)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, address, num_bytes)

    def _freed(self, address: int, num_bytes: int) -> None:
        self._known.discard(address)
        self.now -= num_bytes


def middle_stage(job: JobSpec) -> tuple[StageGraph, list[LayerState]]:
    """All blocks of a model, between an embedding and a head that are elsewhere."""
    layers = [
        LayerState.initial(
            LayerName(name), job.model, job.train, seed=7, device="cpu", optimizer_factory=factory_of(job)
        )
        for name in job.layers[1:-1]
    ]
    return StageGraph(layers, job.model, job.train, is_first=False, is_last=False), layers


def hidden(seed: int = 0) -> Tensor:
    shape = (TRAIN.microbatch_size, TRAIN.sequence_length, MODEL.hidden_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
