"""The delay is exactly one: shown by what the workers of a real run recorded of every operation."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import pause, resume, submit
from headway.daemon.client.job_watch import wait_for_phase
from headway.daemon.jobs.job import PlacementSpec
from headway.daemon.local.cluster import LocalCluster
from headway.daemon.records import Phase
from headway.stages.spec import weight_version
from tests.integration.exactness.test_changes import until_batch
from tests.integration.exactness.training import TIMEOUT_S, WITHOUT_SPARES, finished, small_job

BATCHES = 200


async def test_every_microbatch_is_computed_once_on_the_version_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stages, paused and resumed: forward and backward of each microbatch read W(b-1), and none runs twice."""
    history = tmp_path / "history"
    history.mkdir()
    monkeypatch.setenv("HEADWAY_HISTORY_DIR", str(history))
    spec = replace(small_job("trace", batches=BATCHES), placement=PlacementSpec(recut=False))
    async with (
        LocalCluster(tmp_path / "state", num_nodes=2, node_settings=WITHOUT_SPARES) as cluster,
        ClusterSession(cluster.address) as session,
    ):
        await submit(session, spec)
        await until_batch(session, "trace", 3)
        await pause(session, "trace")
        await wait_for_phase(session, "trace", frozenset({Phase.PAUSED}), timeout_s=TIMEOUT_S)
        await resume(session, "trace")
        result = await finished(session, "trace", tmp_path / "out")
    assert len(set(result.generations)) == 2

    texts = [text for path in history.glob("trace-*.jsonl") for text in path.read_text().splitlines()]
    lines = [line for line in map(json.loads, texts) if "op" in line]
    counts = Counter((line["stage"], line["op"], line["batch"], line["microbatch"]) for line in lines)
    m = spec.train.microbatches
    expected = {
        (stage, op, b, i)
        for stage in (0, 1)
        for op in ("forward", "backward")
        for b in range(BATCHES)
        for i in range(m)
    } | {(stage, "update", b, None) for stage in (0, 1) for b in range(BATCHES)}
    assert counts.keys() == expected
    assert set(counts.values()) == {1}

    for line in lines:
        # Batches 0 and 1 read W_0; every later one is exactly one version late, on both stages, both ways.
        wanted = line["batch"] if line["op"] == "update" else weight_version(line["batch"], 1)
        assert line["version"] == wanted, line
        assert 1 <= line["versions_live"] <= 2, line
    assert max(line["versions_live"] for line in lines) == 2
    late = {line["batch"] - line["version"] for line in lines if line["op"] != "update" and line["batch"] > 0}
    assert late == {1}
