"""The command line in this process, against a cluster that is only a view."""

from collections.abc import Callable
from types import ModuleType

import pytest

from headway.daemon.cli.program import run
from headway.daemon.client import cluster_access
from tests.rigs import fake_cluster as module

Outcome = tuple[int, str, str]


@pytest.fixture
def headway(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs a command line; returns (exit code, stdout, stderr)."""

    def call(*arguments: str) -> Outcome:
        code = run(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def fake_cluster(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Every command that looks for a cluster finds the fake one."""
    monkeypatch.setattr(cluster_access, "ClusterSession", module.FakeSession)
    address = cluster_access.ClusterAddress(etcd=("10.0.0.7:2379",))
    monkeypatch.setattr(cluster_access, "find_cluster", lambda **_: address)
    return module
