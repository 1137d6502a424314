"""The device of a worker: named on the command line, or by the first Prepare of a spare."""

from collections.abc import Callable, Sequence

import structlog
import torch

from headway.daemon.jobs.job import JobSpec
from headway.daemon.records.measurements import DeviceSpeed
from headway.daemon.worker.benchmark import measure_speed
from headway.daemon.worker.held_layers import RefusedError
from headway.daemon.worker.out_of_memory import refusals_of_libraries
from headway.daemon.worker.warm_up import warm_up_layers
from headway.stages.device.device import DeviceLateError, StageDevice
from headway.stages.device.opening import open_device
from headway.stages.stage.allocator import release_freed_memory

log = structlog.get_logger()


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
