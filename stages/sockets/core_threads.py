"""Lets gRPC's own threads encrypt what is large.

gRPC encrypts and writes to the socket inside the call that hands a message over. In Python that call holds the
interpreter's lock: a worker's loop was in it for a third of its time, and the thread that launches the device's work
waited. With this setting the call only hands the message over, and the processor seconds are as many as before.
"""

from collections.abc import Mapping
from typing import Final

EXPERIMENTS: Final = "GRPC_EXPERIMENTS"
"""Variable with gRPC's switches, read at its first use in a process; `-` before a name turns it off."""
OFFLOAD: Final = "secure_endpoint_offload_large_writes"


def with_encryption_aside(environment: Mapping[str, str]) -> dict[str, str]:
    """Return additions to a new process's environment. environment: the process's own; its settings of gRPC stay."""
    told = environment.get(EXPERIMENTS, "")
    if OFFLOAD in told:
        return {}
    return {EXPERIMENTS: ",".join(filter(None, (told, OFFLOAD)))}
