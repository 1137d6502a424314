"""The attachment between two CUDA devices: NCCL, set up so that a worker outlives its peers.

By default torch watches NCCL in a thread of its own: it raises a C++ exception about a peer that has died, or about a
transfer that takes too long, and that ends the process. A worker watches its transfers itself (attachment.py): each
has a deadline by its bytes, and the attachment of a lost peer is aborted while the process goes on.

A transfer is a kernel on both devices. It spins until the other side's has come. A peer that dies leaves the survivor's
kernel spinning until its communicator is aborted.
"""

from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from headway.stages.links.attachment import FORM_TIMEOUT, Direction, KeptPairs, abort_aside

MAX_CTAS: Final = 4
"""Blocks of a transfer's kernel. Each takes a multiprocessor while it spins: with NCCL's own number, five transfers
that wait take all of a card, and none that could end them runs. So it would be with these at 34 replicas of a stage.
"""

SETTINGS: Final = {
    # torch starts neither its watchdog nor the monitor of that watchdog. Both may end the process.
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    # If a version starts them after all: a failed transfer is left to us, and nobody kills or dumps for it.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_DESYNC_DEBUG": "0",
    # Calls of a communicator return instead of waiting for a peer that died, and give up after this time.
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": f"{FORM_TIMEOUT.total_seconds():.0f}",
    # No stack trace of Python for each transfer.
    "TORCH_FR_BUFFER_SIZE": "0",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",
    # One communicator for each direction is what the warning recommends.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}
"""Read in torch 2.13's ProcessGroupNCCL. NCCL's own settings (NCCL_…) belong to the administrator."""

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
"""Of the running kernel, in containers too: virtual cards of two machines may have one UUID."""

OLD_NAMES: Final = ("NCCL_BLOCKING_WAIT", "NCCL_ASYNC_ERROR_HANDLING", "NCCL_DESYNC_DEBUG", "NCCL_ENABLE_TIMING")
"""Names of torch's settings before 2.2. torch still reads them."""


def outlive_peers(environment: MutableMapping[str, str]) -> None:
    """Change a worker's environment, before it makes its first communicator. Settings of the user give way: with them a
    peer's death would end the worker.
    """
    for name in OLD_NAMES:
        environment.pop(name, None)
    environment.update(SETTINGS)


@dataclass(frozen=True, slots=True)
class NcclAttach:
    """An `Attach` of one card."""

    device: torch.device
    on_stuck: Callable[[str], None]
    kept: KeptPairs = field(default_factory=KeptPairs)

    @property
    def card(self) -> str:
        """See `Attach`."""
        kernel = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
        return f"{torch.cuda.get_device_properties(self.device).uuid} {kernel}"

    def side_stream(self) -> "CudaSideStream":
        """See `Attach`."""
        return CudaSideStream(self.device)

    def takes(self, tensor: Tensor) -> bool:
        """See `Attach`."""
        return tensor.is_cuda

    def open(self, store: Store, *, rank: int, sender: int) -> Direction:
        """See `Attach`."""
        from torch._C import _distributed_c10d as c10d

        nccl: Any = getattr(c10d, "ProcessGroupNCCL", None)
        if nccl is None:
            raise RuntimeError("this build of torch has no NCCL; the job's `link` can be grpc")
        options = nccl.Options()
        options._timeout = FORM_TIMEOUT  # of no transfer: those have their own
        options.is_high_priority_stream = True  # a transfer does not queue behind the computation's blocks
        options.config.blocking = 0
        options.config.max_ctas = MAX_CTAS
        torch.cuda.set_device(self.device)
        communicator = nccl(PrefixStore(f"cuda-{sender}", store), rank, 2, options)
        try:
            communicator.eager_connect_single_device(self.device)
        except RuntimeError:
            abort_aside(communicator)
            raise
        direction = Direction(communicator, CudaSideStream(self.device), peer=1 - rank)
        direction.greet(is_sender=sender == rank)
        return direction


class CudaSideStream:
    """A `SideStream` of CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def entered(self) -> AbstractContextManager[Any]:
        """See `SideStream`."""
        torch.cuda.set_device(self._device)  # a new thread is on card 0, and would go back to it afterwards
        context: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return context

    def empty(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """See `SideStream`."""
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        tensor.record_stream(torch.cuda.default_stream(self._device))  # the stream that computes reads it
        return tensor
