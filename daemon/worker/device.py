"""The device that a worker computes on: named on the command line, or by the first Prepare that a spare obeys."""

import structlog
import torch

from headway.daemon.worker.benchmark import measure_speed
from headway.daemon.worker.session import OrderRefusedError
from headway.stages.allocator import release_freed_memory

log = structlog.get_logger()


class WorkerDevice:
    """CUDA is not touched before the index is known: a context costs memory on the device."""

    def __init__(self, kind: str, *, is_to_be_measured: bool = False) -> None:
        """kind: `cpu` or `cuda`."""
        self._kind = kind
        self.is_to_be_measured = is_to_be_measured
        """Its speed is not known yet."""
        self.speed = 0.0
        """Relative, once it was measured."""
        self._index: int | None = None
        self._device = torch.device("cpu")

    @property
    def device(self) -> torch.device:
        """Where tensors go; only valid after `claim` where there is a choice."""
        return self._device

    def claim(self, index: int) -> torch.device:
        """This index, from now on. Raises OrderRefusedError when the process computes on another CUDA device."""
        if self._index is None:
            self._index = index
            structlog.contextvars.bind_contextvars(worker=f"{self._kind}:{index}")
            if self._kind == "cuda":
                self._device = torch.device("cuda", index)
                torch.cuda.set_device(self._device)
                torch.cuda.init()  # type: ignore[no-untyped-call]
            log.info("device_claimed", device=str(self._device), device_index=index)
        elif index != self._index and self._kind == "cuda":
            raise OrderRefusedError(f"this worker computes on device {self._index}, not on {index}")
        return self._device

    def measure(self) -> None:
        """Take a fraction of a second to see how fast it is, once. Where that does not go, the speed stays unknown."""
        self.is_to_be_measured = False
        try:
            self.speed = measure_speed(self._device)
        except RuntimeError as error:  # no memory left on a shared device, above all
            log.warning("device_not_measured", device=str(self._device), reason=str(error).partition("\n")[0])
            return
        finally:
            self.release_memory()
        log.info("device_measured", device=str(self._device), speed=round(self.speed, 3))

    def release_memory(self) -> None:
        """What was freed goes back to the device, and the host's to the kernel."""
        release_freed_memory()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
