"""Sets up torch's NCCL so that a worker outlives its peers. No torch here: the settings are read when a group is made.

By default torch watches NCCL in a thread of its own: it raises a C++ exception about a peer that has died, or about a
transfer that takes too long, and that ends the process. A worker watches its transfers itself (nccl_direction.py): each
has a deadline by its bytes, and the link of a lost peer is aborted while the process goes on.
"""

from collections.abc import MutableMapping
from datetime import timedelta
from typing import Final

FORM_TIMEOUT: Final = timedelta(seconds=20)
"""Maximum time of each step of forming a group, once both sides know of each other."""

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
    # One group for each direction is what the warning recommends.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}
"""Read in torch 2.13's ProcessGroupNCCL. NCCL's own settings (NCCL_…) belong to the administrator."""

OLD_NAMES: Final = ("NCCL_BLOCKING_WAIT", "NCCL_ASYNC_ERROR_HANDLING", "NCCL_DESYNC_DEBUG", "NCCL_ENABLE_TIMING")
"""Names of torch's settings before 2.2. torch still reads them."""


def outlive_peers(environment: MutableMapping[str, str]) -> None:
    """Change a worker's environment, before it makes its first group. Settings of the user give way: with them a peer's
    death would end the worker.
    """
    for name in OLD_NAMES:
        environment.pop(name, None)
    environment.update(SETTINGS)
