"""The delay is exactly one: shown by what the workers of a real run recorded of every operation."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from headway.daemon.client.job_requests import pause, resume, submit
from headway.daemon.client.job_watch import wait_for_phase
from headway.daemon.cluster.records import Phase
from headway.daemon.jobs.job import PlacementSpec
from headway.stages.spec import weight_version
from tests.integration.exactness.training import TIMEOUT_S, finished, small_job
from tests.rigs.fault_harness import FaultHarness

pytestmark = pytest.mark.asyncio(loop_scope="session")

BATCHES = 60
LAYER_S = 0.003
"""Pace of the layers until the pause: the job must not be over before it."""


async def test_every_microbatch_is_computed_once_on_the_version_before(harness: FaultHarness, tmp_path: Path) -> None:
    """Two stages, paused and resumed: forward and backward of each microbatch read W(b-1), and none runs twice."""
    spec = replace(
        small_job("trace", batches=BATCHES, microbatches=4),
        placement=PlacementSpec(min_nodes=2, max_nodes=2, recut=False),
    )
    harness.set_pace(LAYER_S)
    await submit(harness.session, spec)
    await harness.until_batch("trace", 3)
    await pause(harness.session, "trace")
    await wait_for_phase(harness.session, "trace", frozenset({Phase.PAUSED}), timeout_s=TIMEOUT_S)
    harness.set_pace(0)
    await resume(harness.session, "trace")
    result = await finished(harness.session, "trace", tmp_path / "out")
    assert len(set(result.generations)) == 2

    texts = [text for path in harness.history_folder.glob("trace-*.jsonl") for text in path.read_text().splitlines()]
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
