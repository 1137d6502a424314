"""The device of a worker: claimed, warmed up, and measured once.

What torch loads or allocates at first use takes seconds. A spare loads modules before it attaches, and a card pays the
first operations of a job's layers before a stage counts as running.

Speed 1 is the device of plan/layer_costs.py's estimates: on a CPU 60 GFLOP/s of float32 or 120 of bfloat16 on one
thread and 8 GB/s, of which nine tenths of a layer's time count as products; on CUDA 30 or 300 TFLOP/s.
"""

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter, thread_time
from typing import Final

import structlog
import torch

from headway.daemon.base.own_process import keep_what_stays
from headway.daemon.cluster.measurements import DeviceSpeed
from headway.daemon.jobs.job import JobSpec
from headway.daemon.plan.layer_costs import CPU_BYTES_PER_S, CPU_FLOPS_PER_THREAD, CUDA_FLOPS
from headway.daemon.worker.card_host import move_near, pci_address
from headway.daemon.worker.held_layers import RefusedError
from headway.daemon.worker.out_of_memory import refusals_of_libraries
from headway.optim.layer_optimizer import optimizer_factory
from headway.optim.spec import OptimSpec
from headway.stages.data.microbatch import Microbatch
from headway.stages.device.device import DeviceLateError, StageDevice
from headway.stages.device.opening import open_device
from headway.stages.ids import LayerName
from headway.stages.model.decoder import frozen_shapes, trained_shapes
from headway.stages.model.determinism import configure
from headway.stages.model.quantized import is_plain
from headway.stages.spec import ModelSpec, TrainSpec, computed_layers, layer_names
from headway.stages.stage.allocator import release_freed_memory
from headway.stages.stage.batch_gradients import GradientSums
from headway.stages.stage.graph import StageGraph
from headway.stages.stage.relays import parameter_squares
from headway.stages.state.layer_state import LayerState, split_by_layer
from headway.stages.state.weight_versions import WeightVersions

log = structlog.get_logger()

PRODUCTS: Final = 0.9
"""Products' share of the reference's time."""
SECONDS: Final = 0.1
"""Seconds for each measurement, after the first run, which does one-time work."""
CPU_SIZE: Final = 256
"""Rows and columns, as small as a small model's: larger ones would reach more than the model does."""
CUDA_SIZE: Final = 4096
SMALLER: Final = 4
"""A product of so many times fewer rows and columns comes first. It tells whether the full size is too slow."""
CPU_BYTES: Final = 32 << 20
CUDA_BYTES: Final = 512 << 20
_MODEL = ModelSpec(
    num_hidden_layers=1, hidden_size=8, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1, vocab_size=8
)
_TRAIN = TrainSpec(batches=1, microbatches=1, microbatch_size=1, sequence_length=4, attention_backend="math")
WARM_UP: Final = 2
"""Microbatches of a batch, and batches: a sum begins with the second one, and so does Error Feedback. An operation's
code that is loaded later would wait for the transfers that run on the card.
"""
PATIENCE_S: Final = 60.0
"""Time for one layer. A worker that prepares has its own deadline."""


class WorkerDevice:
    """The device. CUDA is not touched before the index is known: a context costs memory on the device."""

    def __init__(self, kind: str, *, is_to_be_measured: bool = False, num_sharers: int = 1) -> None:
        """kind: `cpu` or `cuda`. num_sharers: nodes that share the card, each with its part of the memory."""
        self._kind = kind
        self._num_sharers = num_sharers
        self.is_to_be_measured = is_to_be_measured
        """True if its speed is not known yet."""
        self.speed = DeviceSpeed()
        """Relative speeds, once they were measured."""
        self._index: int | None = None
        self._device = torch.device("cpu")
        self._opened: StageDevice | None = None
        self._warmed: tuple[object, ...] = ()

    @property
    def device(self) -> torch.device:
        """Return the device for tensors; if there is a choice, only valid after `claim`."""
        return self._device

    def claim(self, index: int) -> torch.device:
        """Use this index from now on. Raises RefusedError when the process computes on another CUDA device."""
        if self._index is None:
            self._index = index
            structlog.contextvars.bind_contextvars(worker=f"{self._kind}:{index}")
            if self._kind == "cuda":
                self._device = torch.device("cuda", index)
                torch.cuda.set_device(self._device)
                torch.cuda.init()  # type: ignore[no-untyped-call]
                move_near(pci_address(torch.cuda.get_device_properties(self._device)))
                if self._num_sharers > 1:
                    # Otherwise torch keeps freed memory that the other nodes' workers were promised.
                    torch.cuda.set_per_process_memory_fraction(1 / self._num_sharers, self._device)
            log.info("device_claimed", device=str(self._device), device_index=index)
        elif index != self._index and self._kind == "cuda":
            raise RefusedError(f"this worker computes on device {self._index}, not on {index}")
        return self._device

    def open(self, *, on_failure: Callable[[BaseException], None]) -> StageDevice:
        """Return the claimed device for stages; it is opened once. on_failure: hears of errors in its threads."""
        if self._opened is None:
            self._opened = open_device(self._device, on_failure=on_failure)
        return self._opened

    def warm_up(self, layers: Sequence[str], spec: JobSpec, *, on_failure: Callable[[BaseException], None]) -> None:
        """Pay a card's first operations for these layers, once per shapes. If it lacks the memory, the stage pays.

        on_failure: as for `open`.
        """
        shapes = (spec.model, spec.train, spec.optim)
        if self._kind != "cuda" or self._warmed == shapes:
            return
        self._warmed = shapes
        try:
            with refusals_of_libraries():
                for kind, seconds in warm_up_layers(layers, spec, self.open(on_failure=on_failure)):
                    log.info("layer_warmed_up", kind=kind, seconds=round(seconds, 3), device=str(self._device))
        except (torch.OutOfMemoryError, DeviceLateError) as error:
            log.warning("device_not_warmed_up", device=str(self._device), reason=str(error).partition("\n")[0])
        finally:
            self.release_memory()

    def measure(self) -> None:
        """Measure its speed in less than a second, once. If that fails, the speed stays unknown."""
        self.is_to_be_measured = False
        try:
            self.speed = measure_speed(self._device)
        except RuntimeError as error:  # above all: no memory left on a shared device
            log.warning("device_not_measured", device=str(self._device), reason=str(error).partition("\n")[0])
            return
        finally:
            self.release_memory()
        log.info(
            "device_measured",
            device=str(self._device),
            speed=round(self.speed.float32, 3),
            bfloat16_speed=round(self.speed.bfloat16, 3),
        )

    def release_memory(self) -> None:
        """Give freed memory back: the device's to the device, the host's to the kernel."""
        if self._opened is not None:
            self._opened.let_go()
        release_freed_memory()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def measure_speed(device: torch.device) -> DeviceSpeed:
    """Return the speeds relative to the reference. Uses the threads that are set for this process.

    A card's are those of its products, and its memory has its own. A dtype whose products the device lacks has speed 0.
    Raises RuntimeError if float32 products fail.
    """
    is_card, memory = device.type == "cuda", _bytes_per_s(device)

    def of(dtype: torch.dtype) -> float:
        products = _products(device, dtype)
        return products if is_card else speed(products, memory / CPU_BYTES_PER_S)

    float32 = of(torch.float32)
    try:
        bfloat16 = of(torch.bfloat16)
    except RuntimeError as error:
        log.warning("dtype_not_measured", dtype="bfloat16", device=str(device), reason=str(error).partition("\n")[0])
        bfloat16 = 0.0
    return DeviceSpeed(float32=float32, bfloat16=bfloat16, memory_gb_s=memory / 1e9 if is_card else 0.0)


def speed(products: float, memory: float) -> float:
    """Return a CPU's speed, from the two ratios to the reference."""
    return 1.0 / (PRODUCTS / products + (1.0 - PRODUCTS) / memory)


def flops_per_s(seconds_of: Callable[[int, float], float], size: int) -> tuple[float, int]:
    """Return the operations a second of matrix products of a size, and the size that was measured.

    seconds_of: times products of a size for at most some seconds, and for one product at least. Where one product of
    the full size would take longer than its time, the rate of the smaller size is the estimate. Such a device emulates
    the dtype: it reaches little more with larger products.
    """
    small = size // SMALLER
    small_s = seconds_of(small, 0.0)
    if small_s * SMALLER**3 > SECONDS:
        return 2.0 * small**3 / small_s, small
    return 2.0 * size**3 / seconds_of(size, SECONDS), size


def _products(device: torch.device, dtype: torch.dtype) -> float:
    """Return the rate of a dtype's products, relative to the reference."""
    name = str(dtype).removeprefix("torch.")

    def seconds_of(size: int, within_s: float) -> float:
        # A card draws less power for constant numbers, and keeps a higher clock than a job's.
        numbers = torch.Generator(device).manual_seed(0)
        one, other = (torch.randn((size, size), device=device, generator=numbers).to(dtype) for _ in range(2))
        product = torch.empty_like(one)
        return _seconds(lambda: torch.mm(one, other, out=product), device, within_s)

    is_cuda = device.type == "cuda"
    wanted = CUDA_SIZE if is_cuda else CPU_SIZE
    rate, size = flops_per_s(seconds_of, wanted)
    if size < wanted:
        log.info("speed_estimated", dtype=name, device=str(device), size=size, reason="larger products take too long")
    return rate / (CUDA_FLOPS[name] if is_cuda else CPU_FLOPS_PER_THREAD[name] * torch.get_num_threads())


def _bytes_per_s(device: torch.device) -> float:
    """Return the bytes a second of a copy: each byte is read and written."""
    num_bytes = CUDA_BYTES if device.type == "cuda" else CPU_BYTES
    source = torch.ones(num_bytes // 4, device=device)
    copy = torch.empty_like(source)
    return 2.0 * num_bytes / _seconds(lambda: copy.copy_(source), device, SECONDS)


def _seconds(work: Callable[[], object], device: torch.device, within_s: float) -> float:
    """Return the seconds of the quickest run, because other processes only slow it down. One thread uses its own CPU
    time.
    """
    clock = thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else perf_counter
    work()
    best, ends_at = float("inf"), perf_counter() + within_s
    while True:
        _wait_for(device)
        began = clock()
        work()
        _wait_for(device)
        best = min(best, clock() - began)
        if perf_counter() >= ends_at:
            return max(best, 1e-9)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def warm_up() -> None:
    """Train one batch of the smallest model on the CPU: only the loaded modules stay.

    Modules live as long as the process: the collector is told to skip them, because it runs between two generations.
    """
    cpu = torch.device("cpu")
    configure(_TRAIN, cpu)
    make_optimizer = optimizer_factory(OptimSpec(), num_batches=1, delay=_TRAIN.delay)
    layers = [
        LayerState.initial(LayerName(name), _MODEL, _TRAIN, seed=0, device=cpu, optimizer_factory=make_optimizer)
        for name in layer_names(_MODEL)
    ]
    graph = StageGraph(layers, _MODEL, _TRAIN, is_first=True, is_last=True)
    tokens = torch.zeros((1, _TRAIN.sequence_length), dtype=torch.int64)
    graph.forward((0, 0), Microbatch(tokens, tokens), version=0)
    gradients, _ = graph.backward((0, 0), None)
    graph.update(0, list(gradients))
    del graph, layers, gradients
    keep_what_stays()


def warm_up_layers(layers: Sequence[str], spec: JobSpec, device: StageDevice) -> Iterator[tuple[str, float]]:
    """Yield each kind of these layers with its seconds, once it is done. Draws no random number.

    Raises torch.OutOfMemoryError when the device has no room for one layer, and DeviceLateError.
    """
    by_kind = {spec.model.kind_of(name): name for name in reversed(computed_layers(layers))}
    for kind, name in by_kind.items():
        began = perf_counter()
        _train_once(LayerName(name), spec, device, is_first=kind == "embed", is_last=kind == "head")
        yield kind, perf_counter() - began


def _train_once(name: LayerName, spec: JobSpec, opened: StageDevice, *, is_first: bool, is_last: bool) -> None:
    model, train, device = spec.model, spec.train, opened.torch_device
    dtype: torch.dtype = getattr(torch, train.dtype)
    weights = {key: torch.zeros(shape, device=device) for key, shape in trained_shapes(name, model).items()}
    frozen = {}
    if model.has_adapter:
        frozen = {
            key: torch.zeros(shape, dtype=dtype if is_plain(key, own) else own, device=device)
            for key, (shape, own) in frozen_shapes(name, model).items()
        }
    optimizer = optimizer_factory(spec.optim, **train.of_optimizers)(name, weights)
    versions = WeightVersions(weights, version=0, dtype=dtype)
    layer = LayerState(name, versions, optimizer, train=train, frozen=frozen)
    graph = StageGraph([layer], model, train, is_first=is_first, is_last=is_last)
    tokens = torch.zeros((train.microbatch_size, train.sequence_length), dtype=torch.int64, device=device)
    shape = (train.hidden_rows, train.sequence_length, model.hidden_size)
    hidden = torch.zeros(shape, dtype=dtype, device=device)
    positions = tokens.to(torch.int32) if train.separates_documents else None
    mean_tokens = torch.ones((), device=device) if train.has_mask else None
    rows = Microbatch(tokens if is_first else hidden, tokens, positions, mean_tokens)
    for batch in range(WARM_UP):
        sums = GradientSums(num_microbatches=WARM_UP, num_groups=1)
        for microbatch in range(WARM_UP):
            made = graph.forward((batch, microbatch), rows, version=max(0, batch - train.delay))
            if is_last:
                torch.stack([made, made])  # as a batch's losses
            gradients, _ = graph.backward((batch, microbatch), None if is_last else hidden)
            sums.add(microbatch, list(gradients), others=[hidden])
        total = sums.reduce()
        if train.clip_norm and total:
            torch.cat([parameter_squares(of_layer) for of_layer in split_by_layer([layer], total)])
        graph.update(batch, total)
    opened.mark().wait(PATIENCE_S)
