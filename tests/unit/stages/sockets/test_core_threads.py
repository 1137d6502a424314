"""Large writes are encrypted outside the interpreter's lock."""

import os
import subprocess
import sys

import pytest

from headway.stages.sockets.core_threads import EXPERIMENTS, OFFLOAD, with_encryption_aside

USE_GRPC = "import grpc; grpc.insecure_channel('127.0.0.1:1').close()"


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ("", {EXPERIMENTS: OFFLOAD}),
        ("free_large_allocator", {EXPERIMENTS: f"free_large_allocator,{OFFLOAD}"}),
        (f"-{OFFLOAD}", {}),
    ],
)
def test_the_users_own_switches_stay(told: str, expected: dict[str, str]) -> None:
    """gRPC's switches are one variable: ours is added, unless the user has decided about it."""
    assert with_encryption_aside({EXPERIMENTS: told} if told else {}) == expected


@pytest.mark.parametrize(("more", "is_known"), [({}, True), ({EXPERIMENTS: "no_such_switch"}, False)])
def test_the_installed_grpc_knows_the_switch(more: dict[str, str], is_known: bool) -> None:
    """It names an unknown one in its log, and goes on without: a release that drops ours fails here."""
    environment = {**os.environ, **with_encryption_aside(more)}
    environment.pop("GRPC_VERBOSITY", None)
    done = subprocess.run([sys.executable, "-c", USE_GRPC], env=environment, capture_output=True, text=True, check=True)
    assert ("Unknown experiment" in done.stderr) is not is_known
    assert OFFLOAD not in done.stderr
