"""Token shards, and one thread for every job."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def settings_as_before() -> Iterator[None]:
    """What a job sets for the whole process is as it was when the test is over."""
    threads, is_deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(is_deterministic)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards of a stream that can be learned, written by hand: windows often cross their borders."""
    folder = tmp_path_factory.mktemp("shards")
    stream = (np.random.default_rng(0).integers(0, 16, 400) * np.tile([1, 3], 200)).astype("<u2")
    shards = []
    for number, piece in enumerate(np.split(stream, [90, 250])):
        (folder / f"{number}.bin").write_bytes(piece.tobytes())
        shards.append(
            {
                "file": f"{number}.bin",
                "num_tokens": len(piece),
                "sha256": hashlib.sha256(piece.tobytes()).hexdigest(),
            }
        )
    lines = "".join(f"{line}\n" for line in ["uint16", *(f"{one['num_tokens']} {one['sha256']}" for one in shards)])
    index = {
        "dtype": "uint16",
        "vocab_size": 64,
        "shards": shards,
        "sha256": hashlib.sha256(lines.encode()).hexdigest(),
    }
    (folder / "shards.json").write_text(json.dumps(index), encoding="utf-8")
    return folder
