"""Nodes with one port each, and nodes that only dial out and meet through relays: bits are those of the plain loop."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import submit
from headway.daemon.cluster.records import NodeRecord, Phase
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import PlacementSpec
from headway.daemon.local.cluster import LocalCluster
from headway.daemon.net.certificates import CertificateAuthority
from headway.stages.sockets.shared_port import listening_ports
from tests.integration.daemon.conftest import Playground
from tests.integration.exactness.training import (
    WITHOUT_SPARES,
    Oracle,
    assert_same_bits,
    finished,
    small_job,
    until,
    until_batch,
)
from tests.rigs.paces import paced_layers
from tests.rigs.relays import HOST, free_ports

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]

SAME_CUT = PlacementSpec(min_nodes=2, max_nodes=2, recut=False)
"""No plan follows measured times, so another generation is a link that was not resumed."""
LISTENING = "0A"
"""In /proc/net/tcp."""


def processes_below(pid: int) -> Iterator[int]:
    """Yield a process and all that it has started."""
    yield pid
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text().split():
            yield from processes_below(int(child))


def ports_of(pid: int) -> set[tuple[str, int]]:
    """Return (address, port) of the TCP sockets at which a process and its children listen."""
    inodes = set()
    for each in processes_below(pid):
        for entry in Path(f"/proc/{each}/fd").iterdir():
            try:
                inodes.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
            except OSError:
                continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENING and rest[5] in inodes:
                host, _, port = local.partition(":")
                found.add((host, int(port, 16)))
    return found


def front_of(pid: int) -> int:
    """Return the process that serves a daemon's port."""
    for each in processes_below(pid):
        if b"headway.daemon.net.port" in Path(f"/proc/{each}/cmdline").read_bytes():
            return each
    raise AssertionError("nobody serves the port")


@pytest.mark.slow
async def test_a_job_through_one_port_a_node(tmp_path: Path) -> None:
    """Two nodes, of which one loses the process that serves its port in the middle: links resume, no bit changes."""
    spec = replace(small_job("one-port", batches=60), placement=SAME_CUT)
    one_port = {"HEADWAY_ONE_PORT": "true"}
    async with (
        LocalCluster(tmp_path / "state", num_nodes=2, node_settings=WITHOUT_SPARES, environment=one_port) as cluster,
        ClusterSession(cluster.address) as session,
    ):
        await submit(session, spec)
        job = await until_batch(session, "one-port", 5)
        assert job.plan is not None
        nodes = (await session.view()).nodes
        for node in cluster.nodes:
            assert node.pid is not None
            found = ports_of(node.pid)
            assert len(found) == 2, f"one is the shared port, the other the daemon's behind it: {found}"
            assert all("/" in worker.address for worker in nodes[node.name].workers)
        os.kill(front_of(cluster.nodes[-1].pid), signal.SIGKILL)
        result = await finished(session, "one-port", tmp_path / "out")
    assert_same_bits(result, Oracle(tmp_path / "plain")(spec))
    assert len(set(result.generations)) == 1, "a cut link was not resumed"


@pytest.mark.slow
async def test_a_node_that_only_dials_out_takes_part(tmp_path: Path) -> None:
    """All that comes to the second node comes through the first one's port, whose process is killed in the middle."""
    spec = replace(small_job("relayed", batches=60), placement=SAME_CUT)
    one_port = {"HEADWAY_ONE_PORT": "true"}
    async with (
        LocalCluster(tmp_path / "state", num_nodes=1, node_settings=WITHOUT_SPARES, environment=one_port) as cluster,
        ClusterSession(cluster.address) as session,
    ):
        relay = (await session.view()).nodes["node-1"].address
        far = await cluster.add_node(environment={"HEADWAY_RELAY": relay})
        assert (await session.view()).nodes[far].address == f"{relay}/{far}~"
        await submit(session, spec)
        await until_batch(session, "relayed", 5)
        os.kill(front_of(cluster.nodes[0].pid), signal.SIGKILL)
        result = await finished(session, "relayed", tmp_path / "out")
    assert_same_bits(result, Oracle(tmp_path / "plain")(spec))
    assert len(set(result.generations)) == 1, "a cut link was not resumed"


async def test_a_node_that_stands_by_nowhere_stays_out_of_plans(playground: Playground) -> None:
    """Nobody can reach it. Its record says why, and `nodes` shows that, so a job waits and names the node."""
    playground.start("n1", environment={"HEADWAY_ONE_PORT": "true"}, relay="127.0.0.1:1")
    why = await playground.until(
        lambda view: view.nodes["n1"].ailments.get("relay") if "n1" in view.nodes else None, "its trouble"
    )
    assert why.startswith("stands by at no relay: 127.0.0.1:1: ")
    async with asyncio.timeout(10):
        await playground.until(lambda view: view.nodes["n1"].stays_out == why or None, "the same reason for plans")
    await playground.submit("waiting")
    await playground.until(
        lambda view: "node n1 stays out of plans: stands by at no relay" in view.jobs["waiting"].phase.reason or None,
        "a job that waits",
    )


LAYER_S = 0.005
"""Pace of the layers until a relay has died, so that it does not die too late."""


@contextmanager
def relay(port: int, certificates: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run `headway relay`; the process that serves its port ends with it."""
    command = [sys.executable, "-m", "headway.daemon.cli.main", "relay", "--listen", f"{HOST}:{port}"]
    with log.open("wb") as output:
        process = subprocess.Popen([*command, "--certs", str(certificates)], stdout=output, stderr=output)
    try:
        yield process
    finally:
        with process:
            process.terminate()


@pytest.mark.slow
async def test_two_nodes_that_only_dial_out_train_while_a_relay_dies(tmp_path: Path) -> None:
    """The relay that carries their links dies with all that it passes on: links resume through the other one."""
    placement = PlacementSpec(min_nodes=2, max_nodes=2, recut=False)
    spec = replace(small_job("met", batches=40), placement=placement)
    ports = free_ports(2)
    outside = {"HEADWAY_ONE_PORT": "true", "HEADWAY_RELAY": ",".join(f"{HOST}:{port}" for port in ports)}
    around = outside | paced_layers(tmp_path, LAYER_S)
    async with (
        LocalCluster(tmp_path / "state", num_nodes=1, node_settings=WITHOUT_SPARES, environment=around) as cluster,
        ClusterSession(cluster.address) as session,
    ):
        authority = CertificateAuthority.kept_in(cluster.state_dir / "authority").issuing_into(tmp_path / "relays")
        folders = [authority.issue(f"relay-{port}", hosts=(HOST,)) for port in ports]
        with (
            relay(ports[0], folders[0], tmp_path / "0.log") as first,
            relay(ports[1], folders[1], tmp_path / "1.log") as second,
        ):
            await cluster.add_node()
            nodes = (await session.view()).nodes
            assert all(node.address.endswith(f"/{name}~") for name, node in nodes.items())
            await submit(session, spec)
            job = await until_batch(session, "met", 5)
            assert job.plan is not None
            accepting = listening_ports(nodes[job.plan.workers[1].node].address)[0]
            carries = ports.index(int(accepting.rpartition(":")[2]))
            (first, second)[carries].kill()
            paced_layers(tmp_path, 0)
            result = await finished(session, "met", tmp_path / "out")
    assert_same_bits(result, Oracle(tmp_path / "plain")(spec))
    assert len(set(result.generations)) == 1, "a cut link was not resumed"
    assert '"event": "passed"' in (tmp_path / f"{1 - carries}.log").read_text()


AWAY_S = 40.0
"""Longer than the first pauses between two dials together."""
BACK_S = 20.0
"""From the first moment at which the relay takes connections until the job trains: 7 s on two cores that others use."""


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_job_goes_on_soon_after_the_only_relay_is_back(tmp_path: Path) -> None:
    """No node is blamed for the way that was away, and the bits are the plain loop's."""
    job = small_job("back", batches=60)
    placement = PlacementSpec(min_nodes=2, max_nodes=2, recut=False)
    spec = replace(job, placement=placement, fault=replace(job.fault, link_timeout_s=5.0))
    [port] = free_ports(1)
    outside = {"HEADWAY_ONE_PORT": "true", "HEADWAY_RELAY": f"{HOST}:{port}"} | paced_layers(tmp_path, LAYER_S)
    async with (
        LocalCluster(tmp_path / "state", num_nodes=1, node_settings=WITHOUT_SPARES, environment=outside) as cluster,
        ClusterSession(cluster.address) as session,
    ):
        authority = CertificateAuthority.kept_in(cluster.state_dir / "authority").issuing_into(tmp_path / "relays")
        folder = authority.issue("relay", hosts=(HOST,))
        with relay(port, folder, tmp_path / "0.log") as first:
            await cluster.add_node()
            await submit(session, spec)
            await until_batch(session, "back", 5)
            first.kill()
            await asyncio.sleep(AWAY_S)  # the outage itself
        with relay(port, folder, tmp_path / "1.log"):
            async with asyncio.timeout(60.0):
                while "relay_listens" not in (tmp_path / "1.log").read_text():
                    await asyncio.sleep(0.1)
            since = time.monotonic()
            await until(session, lambda _, job: job.phase.phase is Phase.RUNNING and job.phase.generation > 1, "back")
            back_s = time.monotonic() - since
            paced_layers(tmp_path, 0)
            view = await session.view()
            result = await finished(session, "back", tmp_path / "out")
    assert not any(view.failures.values()), "nobody is to blame"
    assert back_s < BACK_S
    assert_same_bits(result, Oracle(tmp_path / "plain")(spec))


JOB = """
[job]
name = "asked"
[model]
num_hidden_layers = 5
hidden_size = 32
intermediate_size = 64
num_attention_heads = 4
num_key_value_heads = 2
[train]
batches = 10
microbatches = 8
microbatch_size = 2
sequence_length = 16
[placement]
min_nodes = {number}
max_nodes = {number}
"""


async def headway(cluster: LocalCluster, *arguments: str) -> str:
    """Return what a command says of the cluster, on a terminal that is wide enough for its sentences."""
    command = [sys.executable, "-m", "headway.daemon.cli.main", *arguments, "--cluster", str(cluster.state_dir)]
    wide = {**os.environ, "COLUMNS": "400"}
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False, env=wide)
    assert done.returncode == 0, done.stderr
    return done.stdout


def accepting(node: NodeRecord) -> str:
    """Return the port at which others dial a node first."""
    return listening_ports(node.address)[0]


def relayed(links: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return (dialled node, relay) of the links through relays, as `--json` shows them."""
    return [(link["lower"], link["via"]) for link in links if link["via"]]


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_plans_and_commands_name_the_relay_that_links_go_through(tmp_path: Path) -> None:
    """Two nodes only dial out, and others dial the third: a plan of two needs no relay, one of three needs one.

    When that one dies, the node says so, the way through the next one is measured soon, and the job goes on.
    """
    placement = PlacementSpec(min_nodes=3, max_nodes=3, recut=False)
    spec = replace(small_job("named", batches=100_000), placement=placement)
    ports = free_ports(2)
    one_port = {"HEADWAY_ONE_PORT": "true"}
    outside = {**one_port, "HEADWAY_RELAY": ",".join(f"{HOST}:{port}" for port in ports)}
    job_files = {number: tmp_path / f"{number}.toml" for number in (2, 3)}
    for number, path in job_files.items():
        path.write_text(JOB.format(number=number))
    authority = CertificateAuthority.kept_in(tmp_path / "state" / "authority").issuing_into(tmp_path / "relays")
    folders = [authority.issue(f"relay-{port}", hosts=(HOST,)) for port in ports]
    with (
        relay(ports[0], folders[0], tmp_path / "0.log") as first,
        relay(ports[1], folders[1], tmp_path / "1.log") as second,
    ):
        async with (
            LocalCluster(
                tmp_path / "state", num_nodes=1, node_settings=WITHOUT_SPARES, environment=one_port
            ) as cluster,
            ClusterSession(cluster.address) as session,
        ):
            # Each with an address of its own: nodes of one machine do not measure the way between them.
            far = [
                await cluster.add_node(environment={**outside, "HEADWAY_ADVERTISE_HOST": f"127.0.0.{number}"})
                for number in (2, 3)
            ]
            nodes = (await session.view()).nodes
            await submit(session, spec)
            job = await until_batch(session, "named", 3)
            assert job.plan is not None
            order = [stage.node for stage in job.plan.workers]
            dialled = next(name for name in order[1:] if name in far)
            others = [name for name in far if name != dialled]
            lost = accepting(nodes[dialled])

            told = json.loads(await headway(cluster, "status", "named", "--json"))
            assert relayed(told["links"]) == [(dialled, lost)], order
            assert f"through the relay {lost}" in await headway(cluster, "status", "named")
            told = json.loads(await headway(cluster, "plan", str(job_files[3]), "--json"))
            [(lower, via)] = relayed(told["link_kinds"])
            assert via == accepting(nodes[lower])
            assert f"through the relay {via}" in await headway(cluster, "plan", str(job_files[3]))
            assert relayed(json.loads(await headway(cluster, "plan", str(job_files[2]), "--json"))["link_kinds"]) == []

            def is_measured(via: str) -> Any:
                def found(view: ClusterView, _: JobView) -> bool:
                    records = [view.probes.get(name) for name in (*others, "node-1")]
                    ways = [record.peers.get(dialled) for record in records if record is not None]
                    return len(ways) == 2 and all(way is not None and way.via == via for way in ways)

                return found

            await until(session, is_measured(lost), "named")
            (first, second)[ports.index(int(lost.rpartition(":")[2]))].kill()
            [left] = [f"{HOST}:{port}" for port in ports if not lost.endswith(f":{port}")]
            await until(session, lambda view, _: accepting(view.nodes[dialled]) == left, "named")
            await until(session, is_measured(left), "named")
            told = json.loads(await headway(cluster, "status", "named", "--json"))
            assert relayed(told["links"]) == [(dialled, left)]
            batch = told["batch"]
            job = await until_batch(session, "named", batch + 10)
            assert job.plan is not None
            assert job.plan.generation == told["generation"]
            assert [stage.node for stage in job.plan.workers] == order
