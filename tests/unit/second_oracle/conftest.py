"""Token shards, and one thread for every job."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from headway.stages.data.shard_writer import DataForm, writing_shards


@pytest.fixture(autouse=True)
def settings_as_before() -> Iterator[None]:
    """What a job sets for the whole process is as it was when the test is over."""
    threads, is_deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(is_deterministic)


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows for sequences of 12 tokens, with flags, as the product writes them."""
    return written(tmp_path_factory.mktemp("packed") / "data", seed=1, row_tokens=13)


@pytest.fixture(scope="session")
def packed_second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another folder of such rows."""
    return written(tmp_path_factory.mktemp("packed") / "second", seed=2, row_tokens=13)


@pytest.fixture(scope="session")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another stream with flags, in narrower numbers than `data`."""
    return written(tmp_path_factory.mktemp("second") / "data", seed=3, row_tokens=0)


def written(folder: Path, *, seed: int, row_tokens: int) -> Path:
    """Tokens and flags that are drawn, some of them held out, as the product writes them."""
    random = np.random.default_rng(seed)
    with writing_shards(
        folder, DataForm(vocab_size=64, has_flags=True, row_tokens=row_tokens, most_tokens=60)
    ) as writer:
        writer.append(random.integers(0, 64, 13 * 20), random.integers(0, 4, 13 * 20))
        writer.validation.append(random.integers(0, 64, 13 * 16), random.integers(0, 4, 13 * 16))
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards of a stream that can be learned, with flags."""
    return written_by_hand(tmp_path_factory.mktemp("shards") / "data")


def written_by_hand(folder: Path) -> Path:
    """Three shards of a stream that can be learned, with flags, by hand: windows often cross their borders."""
    folder.mkdir()
    stream = (np.random.default_rng(0).integers(0, 16, 600) * np.tile([1, 3], 300)).astype("<u2")
    shards = []
    for number, piece in enumerate(np.split(stream, [90, 250, 400])):
        (folder / f"{number}.bin").write_bytes(piece.tobytes())
        flags = np.random.default_rng(number).choice([0, 1, 2, 3], len(piece), p=[0.4, 0.4, 0.1, 0.1]).astype("<u1")
        (folder / f"{number}.flags").write_bytes(flags.tobytes())
        shards.append(
            {
                "file": f"{number}.bin",
                "num_tokens": len(piece),
                "sha256": hashlib.sha256(piece.tobytes()).hexdigest(),
                "flags": f"{number}.flags",
                "flags_sha256": hashlib.sha256(flags.tobytes()).hexdigest(),
            }
        )
    numbered = [f"{one['num_tokens']} {one['sha256']} {one['flags_sha256']}" for one in shards]
    lines = "".join(f"{line}\n" for line in ["uint16", *numbered[:3], "validation", *numbered[3:]])
    index = {
        "format": 2,
        "dtype": "uint16",
        "vocab_size": 64,
        "shards": shards[:3],
        "validation": shards[3:],
        "sha256": hashlib.sha256(lines.encode()).hexdigest(),
    }
    (folder / "shards.json").write_text(json.dumps(index), encoding="utf-8")
    return folder
