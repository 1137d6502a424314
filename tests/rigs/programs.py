"""What tests of whole programs share: a mark by which whatever they leave is found, and a little data."""

from collections.abc import Collection
from pathlib import Path

MARK = "HEADWAY_TEST_RUN"
"""Variable of every process of a test, with a value of the test's own."""


def marked(value: str, *, but: Collection[int] = ()) -> list[int]:
    """Return the processes with this mark that live, other than some; zombies do not count."""
    mark, found = f"{MARK}={value}".encode(), []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in but:
            continue
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue  # it ended, or belongs to somebody else
    return found


def write_tokens(folder: Path) -> Path:
    """Write 4096 tokens of bytes into a folder of shards, and return it."""
    import numpy as np

    from headway.stages.data.shard_writer import DataForm, writing_shards

    with writing_shards(folder, DataForm(vocab_size=256)) as writer:
        writer.append(np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8))
    return folder
