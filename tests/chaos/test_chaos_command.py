"""`headway chaos` refuses what it cannot do in one line, and does the rest to a real cluster."""

import asyncio
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headway.daemon.cli.program import run
from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import submit
from headway.daemon.client.job_watch import wait_for_phase
from headway.daemon.cluster.records import Phase
from headway.daemon.jobs.job import FaultSpec
from headway.daemon.local.cluster import LocalCluster
from tests.integration.exactness.training import TIMEOUT_S, small_job


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--faults", "maim"), "choose from: kill, "),
        (("--rate", "often"), "6/min"),
        (("--for", "ever"), "90s"),
    ],
)
def test_bad_options_are_told(arguments: tuple[str, str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr, exit code 2, before any cluster is looked for."""
    assert run(["chaos", *arguments]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_without_a_cluster_there_is_nothing_to_strike_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chaos", "--cluster", str(tmp_path)]) == 3
    assert "headway up" in capsys.readouterr().err


async def chaos_program(state_dir: Path, *options: str) -> asyncio.subprocess.Process:
    """`headway chaos` on a cluster of this process."""
    command = ["-m", "headway.daemon.cli.main", "chaos", "--cluster", str(state_dir), *options]
    return await asyncio.create_subprocess_exec(
        sys.executable, *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )


@pytest.mark.slow
async def test_a_real_job_is_struck_at_and_holds(tmp_path: Path) -> None:
    """Two nodes train; kills and a pause from a seed: each is listed, and the verdict is good.

    Then a pause of an hour is interrupted by Ctrl-C: the node goes on, and so does the job.
    """
    spec = small_job("struck", batches=5000)
    spec = replace(spec, fault=FaultSpec(snapshot_every=5, checkpoint_every=0))
    settings = {"quarantine_after": 0}
    async with (
        LocalCluster(tmp_path / "state", num_nodes=2, node_settings=settings, stop_timeout_s=5.0) as cluster,
        ClusterSession(cluster.address) as session,
    ):
        await submit(session, spec)
        await wait_for_phase(session, "struck", frozenset({Phase.RUNNING}), timeout_s=TIMEOUT_S)
        striking = await chaos_program(
            cluster.state_dir, "struck", "--faults", "kill", "--rate", "40/min", "--for", "5s", "--seed", "3", "--json"
        )
        out, error = await asyncio.wait_for(striking.communicate(), TIMEOUT_S)
        assert striking.returncode == 0, f"{out.decode()}\n{error.decode()}"
        told = json.loads(out)
        assert told["passed"]
        assert told["faults"]
        assert {fault["kind"] for fault in told["faults"]} == {"kill"}
        assert all(fault["new_generation"] for fault in told["faults"])
        assert told["reasons"] == []

        pausing = await chaos_program(
            cluster.state_dir, "--faults", "pause", "--rate", "60/s", "--for", "1m", "--longest", "1h"
        )
        assert pausing.stdout is not None
        async with asyncio.timeout(TIMEOUT_S):
            while b"pause: node-" not in await pausing.stdout.readline():
                pass
        pausing.send_signal(signal.SIGINT)
        await asyncio.wait_for(pausing.communicate(), TIMEOUT_S)
        assert pausing.returncode == 128 + signal.SIGINT
        for pid in cluster.node_pids.values():
            assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T"
