"""Two nodes that only dial out meet through relays that have no worker: one of these is killed, and no bit changes."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import submit
from headway.daemon.jobs.job import PlacementSpec
from headway.daemon.local.cluster import LocalCluster
from headway.daemon.rpc.certificates import CertificateAuthority
from headway.stages.sockets.shared_port import listening_ports
from tests.integration.exactness.training import (
    WITHOUT_SPARES,
    Oracle,
    assert_same_bits,
    finished,
    small_job,
    until_batch,
)

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]
HOST = "127.0.0.1"


def free_ports(number: int) -> list[int]:
    """Return ports that nobody has now."""
    held = [socket.create_server((HOST, 0)) for _ in range(number)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


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
    async with (
        LocalCluster(tmp_path / "state", num_nodes=1, node_settings=WITHOUT_SPARES, environment=outside) as cluster,
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
            accepting = listening_ports(nodes[job.plan.stages[1].node].address)[0]
            carries = ports.index(int(accepting.rpartition(":")[2]))
            (first, second)[carries].kill()
            result = await finished(session, "met", tmp_path / "out")
    assert_same_bits(result, Oracle(tmp_path / "plain")(spec))
    assert len(set(result.generations)) == 1, "a cut link was not resumed"
    assert '"event": "passed"' in (tmp_path / f"{1 - carries}.log").read_text()
