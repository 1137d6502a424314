"""Daemons as processes: jobs that are put into etcd run, and every way to leave has its end."""

import asyncio
import os
import signal
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headway.daemon.base.errors import RecoveryError
from headway.daemon.blobs.peer_client import NodeClient, layer_request
from headway.daemon.cluster.format import decode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import NodeRecord, Phase, WorkerState, newer_ailment
from headway.daemon.cluster.state_key import JOURNAL, StateKey
from headway.proto import control_pb2

BATCHES = 60
LAYER_S = 0.005
"""Pace of the layers until a node or a worker is gone, so that it does not go too late."""
EXIT_CONFIG, EXIT_UNREACHABLE = 2, 3
PARTS = {"embed", "block.0", "block.1", "head", JOURNAL}


async def test_a_job_runs_to_its_end_and_everything_about_it_can_be_asked_for(playground: Any) -> None:
    """One node: the weights lie in the checkpoint; journal, logs and layers come over gRPC; SIGTERM ends with 0."""
    await playground.started("a")
    await playground.submit(batches=5)
    job = await playground.phase(Phase.FINISHED, Phase.FAILED)
    assert job.phase.phase is Phase.FINISHED, job.phase.error
    assert job.checkpoint is not None
    assert set(job.checkpoint.files) == PARTS
    folder = playground.folder / job.checkpoint.url
    assert {path.name for path in folder.iterdir()} == {f"{part}.safetensors" for part in PARTS} | {"manifest.json"}

    address = (await playground.view()).nodes["a"].endpoint
    client = NodeClient(playground.etcd.identity)
    described = await client.describe(address)
    assert (described.node, described.etcd_reachable, described.leader) == ("a", True, "a")
    told = [rows async for rows in client.journal(address, "tiny", from_batch=2)]
    assert [batch for rows in told for batch in rows.batch] == [2, 3, 4]
    lines = [line async for line in client.logs(address, control_pb2.LogsRequest(job="tiny"))]
    assert any("boundary_reached" in line.text for line in lines)
    key = StateKey("tiny", job.checkpoint.timeline, 5, "head")
    pieces = [piece async for piece in client.read(address, layer_request(key, forward=True))]
    assert b"".join(pieces) == (folder / "head.safetensors").read_bytes()
    with pytest.raises(RecoveryError, match="there is no such job"):
        [rows async for rows in client.journal(address, "another")]
    await client.close()

    playground.signal("a", signal.SIGTERM)
    assert await playground.ended("a") == 0
    await playground.nothing_left()
    assert (await playground.view()).nodes == {}


async def test_a_killed_daemon_leaves_no_worker(playground: Any) -> None:
    """SIGKILL of the daemon: its worker dies with it, and its name is free again at once for the next daemon."""
    await playground.started("a")
    await playground.until(lambda _: len(playground.marked()) >= 2 or None, "a worker")
    before = (await playground.view()).nodes["a"].incarnation
    playground.signal("a", signal.SIGKILL)
    await playground.ended("a")
    await playground.nothing_left()
    playground.start("a")
    await playground.until(
        lambda view: ("a" in view.nodes and view.nodes["a"].incarnation != before) or None, "the next incarnation"
    )


async def test_a_lost_lease_is_followed_by_another(playground: Any) -> None:
    """Somebody revokes the node's lease, then deletes its record: the same process is back with the same worker."""
    await playground.started("a")
    await playground.submit(batches=100_000)
    running = await playground.batch(2)
    pids = {record.pid for record in running.workers_of(running.plan).values()}
    entry = await playground.client.get(Keys.node("a"))
    assert entry is not None
    before = decode(entry.value, NodeRecord)
    await playground.client.revoke_lease(entry.lease_id)
    again = await playground.until(lambda view: view.nodes.get("a"), "the record under another lease")
    assert (again.incarnation, again.address) == (before.incarnation, before.address)
    await playground.client.delete(Keys.node("a"))
    await playground.until(lambda view: view.nodes.get("a"), "the record, written again")

    def runs(view: Any) -> Any:
        job = view.jobs["tiny"]
        records = job.workers_of(job.plan).values() if job.plan is not None else ()
        return {record.pid for record in records if record.state is WorkerState.RUNNING} or None

    assert await playground.until(runs, "a running worker") == pids
    playground.signal("a", signal.SIGTERM)
    assert await playground.ended("a") == 0
    await playground.nothing_left()


async def test_a_daemon_says_how_it_is_to_the_service_manager(playground: Any) -> None:
    """Under a socket that stands in for systemd: READY, WATCHDOG, then at SIGTERM a longer time and STOPPING."""
    path = str(playground.folder / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path)
        manager.setblocking(False)
        playground.start("a", environment={"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "400000"})

        async def hear(word: str) -> list[str]:
            heard: list[str] = []
            while not any(word in text for text in heard):
                raw = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(manager, 1000), 60)
                heard.append(raw.decode())
            return heard

        assert (await hear("READY=1"))[0].startswith("READY=1\nSTATUS=node a")
        await hear("WATCHDOG=1")
        playground.signal("a", signal.SIGTERM)
        await hear("STOPPING=1")
        await hear("EXTEND_TIMEOUT_USEC=")
        assert await playground.ended("a") == 0


@pytest.mark.slow
async def test_all_daemons_leave_and_the_job_goes_on_later(playground: Any) -> None:
    """Both daemons get SIGTERM at once: the job ends in a checkpoint and is queued; new daemons finish it."""
    await playground.started("a", "b")
    await playground.submit(batches=400)
    await playground.batch(20)
    for name in ("a", "b"):
        playground.signal(name, signal.SIGTERM)
    assert [await playground.ended(name) for name in ("a", "b")] == [0, 0]
    job = (await playground.view()).jobs["tiny"]
    assert job.phase.phase is Phase.QUEUED
    assert job.checkpoint is not None
    assert 20 < job.checkpoint.boundary < 400
    await playground.started("a")
    job = await playground.phase(Phase.FINISHED, Phase.FAILED)
    assert job.phase.phase is Phase.FINISHED, job.phase.error


@pytest.mark.slow
async def test_a_second_signal_does_not_wait(playground: Any) -> None:
    """The stop boundary is far away: a second SIGTERM ends the daemon by that signal, and its worker with it."""
    await playground.started("a")
    await playground.submit(batches=100_000)
    await playground.batch(1)
    (worker,) = [pid for pid in playground.marked() if pid != playground.daemons["a"].pid][:1]
    os.kill(worker, signal.SIGSTOP)
    playground.signal("a", signal.SIGTERM)
    await asyncio.to_thread(_wait_for, playground.log_of("a"), "leave_began")
    playground.signal("a", signal.SIGTERM)
    assert await playground.ended("a") == -signal.SIGTERM
    await playground.nothing_left()


@pytest.mark.slow
async def test_missing_data_fails_the_job_in_one_line(playground: Any, tmp_path: Path) -> None:
    """One job names a folder that no node has, others some that its node forbids: the reasons name the folders."""
    playground.start("a", num_devices=2, allowed_places=tmp_path)
    await playground.submit(source=str(tmp_path / "nowhere"), sha256="0" * 64)
    await playground.submit("forbidden", source="/usr/share/data", sha256="1" * 64)
    keys = playground.etcd.authority.issue("a")
    await playground.submit("thief", source=str(keys), sha256="2" * 64)
    thief = await playground.phase(Phase.FAILED, name="thief")
    assert f"{keys}: is a place of this node's own, which no job may name" in thief.phase.error
    job, forbidden = await playground.phase(Phase.FAILED), await playground.phase(Phase.FAILED, name="forbidden")
    assert job.phase.error.startswith("node a: data 000000000000…")
    assert "nowhere: no token shards here" in job.phase.error
    assert "/usr/share/data: is not below one of this node's allowed_places" in forbidden.phase.error
    assert "\n" not in job.phase.error + forbidden.phase.error


async def test_a_job_of_a_newer_release_is_told_by_the_node_and_left_alone(playground: Any) -> None:
    """It sets what this release does not know: the node's record says so until it is gone; another job is trained."""
    await playground.submit("new")
    key = Keys.of("new", "spec")
    raw = msgspec.json.decode((await playground.client.get(key)).value)
    raw["spec"]["train"]["ahead"] = 3
    await playground.client.put(key, msgspec.json.encode(raw))
    await playground.started("a")
    ailment = newer_ailment("new")
    told = await playground.until(lambda view: view.nodes["a"].ailments.get(ailment), "the node says so")
    assert "this one does not know spec.train.ahead, which is set; upgrade this machine" in told
    await playground.submit(batches=5)
    await playground.phase(Phase.FINISHED)
    assert await playground.client.get(Keys.of("new", "phase")) is None
    assert await playground.client.delete(key)
    await playground.until(lambda view: ailment not in view.nodes["a"].ailments or None, "it is well again")


@pytest.mark.slow
async def test_a_cluster_may_have_ipv6_addresses(playground: Any) -> None:
    """Two nodes listen at ::1, one of them told so in brackets: their records can be dialled, and a job is trained."""
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    playground.start("a", listen="[::1]:0")
    playground.start("b", listen="[::]:0", advertise_host="[::1]")
    view = await playground.until(lambda view: view if len(view.nodes) == 2 else None, "two nodes")
    assert all(node.address.startswith("[::1]:") and node.host == "::1" for node in view.nodes.values())
    await playground.submit(batches=5, min_nodes=2)
    job = await playground.phase(Phase.FINISHED, Phase.FAILED)
    assert job.phase.phase is Phase.FINISHED, job.phase.error


@pytest.mark.slow
async def test_daemons_that_cannot_start_say_why_in_one_line(playground: Any, tmp_path: Path) -> None:
    """Each mistake: its exit code, one line, no traceback, nothing left."""
    await playground.started("a")
    stranger = tmp_path / "stranger"
    (tmp_path / "empty").mkdir()
    stranger.mkdir()
    for file in ("ca.pem", "cert.pem", "key.pem"):
        (stranger / file).write_text("no PEM")
    taken = (await playground.view()).nodes["a"].address
    mistakes: list[tuple[str, dict[str, object], int, str]] = [
        ("d", {"certificates": tmp_path / "empty"}, EXIT_CONFIG, "ca.pem: cannot be read: No such file or directory"),
        ("e", {"certificates": stranger}, EXIT_CONFIG, "ca.pem: is not a certificate in PEM"),
        ("f", {"devices": "cuda"}, EXIT_CONFIG, "no CUDA device here: "),
        ("g", {"listen": taken}, EXIT_CONFIG, f"cannot listen at {taken}"),
        ("h", {"state_dir": playground.folder / "a"}, EXIT_CONFIG, "another daemon runs on this state_dir"),
        ("i", {"etcd": "127.0.0.1:1"}, EXIT_UNREACHABLE, "etcd at 127.0.0.1:1"),
        ("a", {"state_dir": playground.folder / "c"}, EXIT_CONFIG, "a node of this name is in the cluster"),
    ]
    runs = [asyncio.to_thread(playground.refuse, name, **flags) for name, flags, _, _ in mistakes]
    for (returned, said), (_, _, code, text) in zip(await asyncio.gather(*runs), mistakes, strict=True):
        plain = [line for line in said.splitlines() if not line.startswith("{")]
        assert (returned, len(plain)) == (code, 1), said
        assert text in plain[0]
    playground.signal("a", signal.SIGTERM)
    assert await playground.ended("a") == 0
    await playground.nothing_left()


def _wait_for(path: Path, text: str) -> None:
    import time

    deadline = time.monotonic() + 30
    while text not in path.read_text():
        assert time.monotonic() < deadline, f"{path} has no {text}"
        time.sleep(0.02)


async def test_a_state_folder_that_hangs_at_the_start_is_named(playground: Any) -> None:
    """Within seconds the log says which folder does not answer, and a signal ends the daemon."""
    folder = playground.folder / "a"
    folder.mkdir()
    os.mkfifo(folder / "incarnation")  # opening it waits for a writer, as on a server that is away

    def has_said(_: Any) -> bool | None:
        text = playground.log_of("a").read_text()
        return ("folder_does_not_answer" in text and str(folder) in text) or None

    playground.start("a")
    await playground.until(has_said, "a line about the folder")
    playground.signal("a", signal.SIGTERM)
    assert await playground.ended("a") == -signal.SIGTERM
