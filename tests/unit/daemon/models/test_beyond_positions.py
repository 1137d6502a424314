"""Sequences that are longer than those for which a model was made are told of, and trained."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.daemon.client.planned_job import read_planned
from headway.daemon.client.submission import read_draft
from headway.daemon.cluster.records import Device
from headway.stages.data.shard_writer import DataForm, writing_shards

pytest.importorskip("transformers")

from tests.rigs.tiny_models import write_tiny_model

YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}
LONGER = {"max_position_embeddings": 512} | YARN


def job_of(folder: Path, length: int, **config: Any) -> Path:
    """A job beside a model of 64 positions, whose config.json has other values; None: not this key."""
    file = write_tiny_model(folder / "model") / "config.json"
    told = json.loads(file.read_text()) | config
    file.write_text(json.dumps({key: value for key, value in told.items() if value is not None}))
    with writing_shards(folder / "data", DataForm(vocab_size=256)) as writer:
        writer.append(np.arange(9000) % 200, None)
    job = folder / "job.toml"
    job.write_text(
        f'[job]\nname = "j"\n[model]\nfrom = "model"\n[data]\nsource = "data"\n[train]\nsequence_length = {length}\n'
    )
    return job


@pytest.mark.parametrize(
    ("length", "config", "reach"),
    [
        (64, {}, ""),
        (65, {}, "64"),
        (256, YARN, ""),
        (257, YARN, "256"),
        (512, LONGER, ""),
        (513, LONGER, "512"),
        (2048, {"max_position_embeddings": 1024}, "1,024"),
        (65, {"max_position_embeddings": None}, ""),
    ],
)
def test_plan_and_submit_tell_of_longer_sequences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], length: int, config: dict[str, Any], reach: str
) -> None:
    """One line each, in the same words; scaled positions reach as far as their factor says."""
    job, told = job_of(tmp_path, length, **config), list[str]()
    read_planned(job, warn=told.append)
    assert len(told) == bool(reach)
    if reach:
        assert f"sequence_length is {length:,}, and {tmp_path}/model was made for {reach} positions" in told[0]
    capsys.readouterr()
    read_draft(job).resolved_here([Device(kind="cpu")])
    assert capsys.readouterr().err == "".join(f"headway: {line}\n" for line in told)
