"""Nodes try a job's checkpoint folder when it is submitted."""

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.blobs import checkpoint, peer_client
from headway.daemon.cli import options, submission
from headway.daemon.client import job_requests
from headway.daemon.client.checkpoint_folder import warnings_about
from headway.daemon.client.job_requests import submitter
from headway.daemon.decide.cluster_view import ClusterView
from headway.proto.control_pb2 import TryFolderReply
from headway.stages.data.shard_writer import DataForm, writing_shards

JOB = """
[job]
name = "j"
[data]
source = "data"
[fault]
checkpoint_dir = "s3://bucket/c"
"""


@pytest.mark.parametrize("identity", [None, "a certificate"])
def test_a_store_that_no_node_can_be_asked_about_is_tried_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, identity: str | None
) -> None:
    """A local cluster without certificates: this machine tries the store. With them its nodes do."""
    with writing_shards(tmp_path / "data", DataForm(vocab_size=256)) as writer:
        writer.append(np.arange(10_000, dtype=np.int64) % 256)
    (tmp_path / "job.toml").write_text(JOB)
    submitted: list[str] = []
    tried: list[str] = []

    async def view() -> ClusterView:
        return ClusterView()

    async def submit(_: object, spec: Any, **__: object) -> None:
        submitted.append(spec.job.name)

    class Where(options.Where):
        def run(self, work: Callable[[Any], Coroutine[Any, Any, Any]], **_: object) -> Any:
            session = SimpleNamespace(view=view, identity=identity, address=SimpleNamespace(state_dir=tmp_path))
            return asyncio.run(work(session))

    class Client:
        def __init__(self, _: object) -> None:
            """There are no nodes."""

        async def close(self) -> None:
            """There is nothing to close."""

    monkeypatch.setattr(job_requests, "submit", submit)
    monkeypatch.setattr(peer_client, "NodeClient", Client)
    monkeypatch.setattr(checkpoint, "probe", tried.append)
    submission.submit(tmp_path / "job.toml", options=submission.SubmitOptions(), where=Where())
    assert submitted == ["j"]
    assert tried == ([] if identity else ["s3://bucket/c"])


Headway = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("command", [("plan", "--nodes", "2"), ("reference", "--out", "out"), ("run", "--out", "out")])
@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("hidden_size = 640000", "model.hidden_size: must be at most 65536, is 640000"),
        ("num_hidden_layers = 50000000", "model.num_hidden_layers: must be at most 1024"),
    ],
)
def test_an_impossible_size_is_one_line(
    headway: Headway, tmp_path: Path, command: tuple[str, ...], model: str, line: str
) -> None:
    """A width or depth that no machine holds is refused by every command that reads the file."""
    job = tmp_path / "job.toml"
    job.write_text(f'[job]\nname = "x"\n[model]\n{model}\n')
    name, *flags = command
    code, out, err = headway(name, str(job), *flags)
    assert (code, out) == (2, "")
    assert line in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("size", "bytes_needed"),
    [
        ("[model]\nhidden_size = 65536\nintermediate_size = 65536", "TiB"),
        ("[train]\nmicrobatch_size = 65536\n[model]\nvocab_size = 65536", "TiB"),
    ],
)
def test_the_reference_of_a_job_that_does_not_fit_is_one_line(
    headway: Headway, tmp_path: Path, size: str, bytes_needed: str
) -> None:
    """A model or microbatch of several TiB keeps every rule; the loop that would hold it in one process refuses it."""
    job = tmp_path / "job.toml"
    job.write_text(f'[job]\nname = "x"\n{size}\n')
    code, out, err = headway("reference", str(job), "--out", str(tmp_path / "out"))
    assert (code, out) == (2, "")
    assert "job.toml:model: weights, optimizers and one microbatch take" in err
    assert f"{bytes_needed}, and this machine has" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_user_without_a_name_may_submit(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container the user's number may be in no list of users: the number is written."""

    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr("getpass.getuser", nobody)
    assert submitter() == f"{os.getuid()}@{socket.gethostname()}"


@pytest.mark.parametrize("command", [("run", "small.toml", "--out"), ("up", "--state-dir")])
def test_a_state_folder_that_no_node_can_have_is_told_at_once(
    headway: Headway, tmp_path: Path, command: tuple[str, ...]
) -> None:
    """A path that is no UTF-8: one line before anything is read or made."""
    code, out, err = headway(*command, str(tmp_path / "o\udcff"))
    assert (code, out) == (2, "")
    assert "cannot be the state folder: its path is not UTF-8" in err
    assert "--state-dir" in err
    assert not list(tmp_path.iterdir())


URL = "s3://bucket/c"
FINE = TryFolderReply()
POOR = TryFolderReply(reason="this node has no credentials for it", lacks_access=True)
AWAY = TryFolderReply(reason="its server does not answer")


def test_a_folder_that_no_node_has_access_to_is_refused() -> None:
    """Both nodes lack credentials: one line with the key, the folder, a node and its reason."""
    with pytest.raises(ConfigError) as caught:
        warnings_about(URL, {"a": POOR, "b": POOR}, "j.toml:fault.checkpoint_dir")
    assert str(caught.value) == (
        "j.toml:fault.checkpoint_dir: no node has access to s3://bucket/c, among them a: this node has no credentials "
        "for it; give the daemons what is missing, or name another folder"
    )


POOR_A = "a has no access to s3://bucket/c: this node has no credentials for it"
WAITING = "a cannot write to s3://bucket/c now: its server does not answer; the job trains, and its checkpoints wait"


@pytest.mark.parametrize(
    ("answers", "warnings"),
    [
        ({"a": POOR, "b": FINE}, [POOR_A]),
        ({"a": POOR, "b": AWAY}, [POOR_A, WAITING.replace("a", "b", 1)]),
        ({"a": POOR, "b": "no answer"}, [POOR_A]),
        ({"b": AWAY, "a": AWAY}, [WAITING]),
        ({"a": FINE, "b": "not implemented"}, []),
        ({"a": "not implemented"}, [f"no node could be asked whether it can write to {URL}: not implemented"]),
        ({}, []),
    ],
)
def test_trouble_with_the_folder_is_a_warning(answers: dict[str, TryFolderReply | str], warnings: list[str]) -> None:
    """The job is accepted: another node can write, or may later, or could not be asked."""
    assert warnings_about(URL, answers, "") == warnings
