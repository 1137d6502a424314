"""What a refusal advises works where it is given, and says it once."""

import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast
from unittest.mock import AsyncMock

import pytest

from headway.daemon.base.errors import ConfigError, ConflictError, StoreUnreachableError
from headway.daemon.client import cluster_access, node_requests
from headway.daemon.client.checkpoint_folder import check_checkpoint_dir
from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import submit
from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.connection import EtcdAccess
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.jobs.job import JobSection
from headway.daemon.net import port_process
from headway.daemon.reports.safety_report import SafetyReport, safety_lines
from tests.rigs.fake_cluster import SPEC, cluster_view

Headway = Callable[..., tuple[int, str, str]]


@dataclass
class Session:
    """A cluster that is only a view, and whose etcd refuses every change."""

    seen: ClusterView
    identity: None = None

    @property
    def client(self) -> object:
        return SimpleNamespace(transaction=AsyncMock(side_effect=ConflictError("k", "changed")))

    async def view(self) -> ClusterView:
        return self.seen


def session(view: ClusterView) -> ClusterSession:
    return cast(ClusterSession, Session(view))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("demo", r"\(running\); choose another, or end that job with `headway cancel demo`, and then `headway jobs rm"),
        ("broken", r"\(failed\); choose another, or remove that job with `headway jobs rm broken`"),
    ],
)
async def test_a_name_in_use_is_freed_by_what_its_phase_allows(name: str, said: str) -> None:
    """`jobs rm` refuses a job that goes on."""
    with pytest.raises(ConfigError, match=said):
        await submit(session(cluster_view()), replace(SPEC, job=JobSection(name=name)))


async def test_a_drain_says_what_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The jobs whose layers the node holds, or that there are none."""
    monkeypatch.setattr(node_requests, "_mark", AsyncMock(return_value=True))
    told = await node_requests.drain(session(cluster_view()), "a")
    assert told == "a: its layers are being moved; `headway events demo` shows the moves"
    told = await node_requests.drain(session(cluster_view()), "c")
    assert told == "c: holds layers of no job, and takes no work until `headway nodes release c`"


def test_a_folder_for_checkpoints_is_advised_once(tmp_path: Path) -> None:
    """Its form on a cluster of several machines, or that this machine cannot write there."""
    with pytest.raises(ConfigError, match=r"give a URL or an absolute path that all nodes see$"):
        check_checkpoint_dir(SPEC, job_file=Path("j.toml"), root=None)
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(ConfigError, match=r"[^;]*; name a folder or URL that can be written to$"):
        check_checkpoint_dir(SPEC, job_file=Path("j.toml"), root=tmp_path)


@pytest.mark.parametrize("is_local", [False, True])
def test_a_plan_tells_that_submit_would_refuse(
    headway: Headway, fake_cluster: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_local: bool
) -> None:
    """A relative folder of checkpoints, on a cluster that is not one of this machine alone."""
    address = cluster_access.ClusterAddress(etcd=("10.0.0.7:2379",), state_dir=tmp_path if is_local else None)
    monkeypatch.setattr(cluster_access, "find_cluster", lambda **_: address)
    (tmp_path / "job.toml").write_text('[job]\nname = "x"\n')
    code, _, err = headway("plan", str(tmp_path / "job.toml"), "--etcd", "10.0.0.7:2379")
    assert code == 0
    assert ("`headway submit` would refuse the job: " in err) is not is_local
    assert ("checkpoint_dir = 'checkpoints' is relative" in err) is not is_local


def test_a_boundary_of_unknown_age_has_none() -> None:
    """A failed job has no plan, so nobody knows what a failure would cost it."""
    (line,) = safety_lines(SafetyReport(restorable=(3047, 3040), copies=2))
    assert line == "restorable: boundary 3047, 3040 (2 copies)"


def test_a_choice_is_refused_in_plain_words(headway: Headway) -> None:
    """Without the words of the library that reads it."""
    code, _, err = headway("invite", "n", "--role", "boss")
    assert code == 2
    assert "Invalid value for '--role': 'boss' is not one of 'node', 'operator', 'reader'" in err


def test_certificates_that_are_made_again_are_told(headway: Headway, tmp_path: Path) -> None:
    """Whoever runs the line twice has to copy the folder again."""
    first = headway("certs", str(tmp_path / "ca"), "a")[1]
    assert "replaced" not in first
    assert headway("certs", str(tmp_path / "ca"), "a", "b")[1].splitlines() == [
        f"{tmp_path}/ca/a: for node a; the key and certificate that were there are replaced",
        f"{tmp_path}/ca/b: for node b",
    ]


def test_an_unknown_date_is_no_date(headway: Headway, fake_cluster: ModuleType) -> None:
    """The nodes' certificates were made by hand: the cluster does not know when."""
    _, out, _ = headway("certs", "list", "--json")
    assert '"issued_at": null' in out
    assert "0.0" not in out


def test_many_objects_are_announced(headway: Headway) -> None:
    """`watch --json` and `logs --json` give no document, which a reader of one would refuse."""
    for command in ("watch", "logs", "run"):
        assert "one object a line" in headway(command, "--help")[1], command
    assert "one object a line" not in headway("status", "--help")[1]


async def test_a_closed_port_is_no_question_of_certificates() -> None:
    """Nothing listens where etcd should: it may be down, or elsewhere."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    client = EtcdClient(EtcdAccess(endpoints=(f"127.0.0.1:{port}",), timeout_s=0.5))
    try:
        with pytest.raises(StoreUnreachableError, match="Connection refused; is etcd running there\\? --etcd names it"):
            await client.get("x")
    finally:
        await client.close()


def test_a_port_that_is_taken_is_told_once() -> None:
    """With the flag that names another one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError) as refused:
            port_process._listen("127.0.0.1", port)
    said = f"listen: cannot listen at 127.0.0.1:{port}: Address already in use; name another port with --listen"
    assert str(refused.value) == said


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_start_shows_at_once_that_it_begins(
    headway: Headway, monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    """Before the imports, which take seconds on a slow machine; a log needs no such line."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    _, _, err = headway("daemon", "--config", "nope.toml")
    assert err.startswith("headway: starting\n") is is_terminal
    assert "nope.toml" in err.splitlines()[-1]
