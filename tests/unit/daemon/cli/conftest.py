"""The command line in this process, against a cluster that is only a view."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from headway.daemon.cli.program import run
from headway.daemon.client import cluster_access

Outcome = tuple[int, str, str]


def _load(name: str) -> ModuleType:
    path = Path(__file__).with_name(f"{name}.py")
    specification = importlib.util.spec_from_file_location(f"cli_{name}", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


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
    module = _load("fake_cluster")
    monkeypatch.setattr(cluster_access, "ClusterSession", module.FakeSession)
    address = cluster_access.ClusterAddress(etcd=("10.0.0.7:2379",))
    monkeypatch.setattr(cluster_access, "find_cluster", lambda **_: address)
    return module
