"""The built-in data `python-stdlib`: the sources of the running Python's standard library, as byte tokens.

Equal Python releases give equal bytes. Nodes with different ones disagree about the SHA-256, and report it.
"""

import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from headway.stages.data.shard_index import INDEX_NAME
from headway.stages.data.shard_writer import DataForm, writing_shards
from headway.stages.errors import DataError

SOURCE_NAME = "python-stdlib"
END_OF_FILE = 0
"""The token between two files: a byte that no source contains."""
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"})
"""Installed packages, tests, and parts that distributions package separately."""


def builtin_corpus(cache_dir: Path) -> Path:
    """Return the folder of the standard library's token shards, below `cache_dir`; the first caller writes it.

    About 11 MB. Safe with several processes at once. Raises DataError when this Python came without its sources.
    """
    folder = cache_dir / f"{SOURCE_NAME}-{platform.python_version()}-v1"
    if (folder / INDEX_NAME).exists():
        return folder
    library = Path(sysconfig.get_path("stdlib"))
    provenance = f"sources of the standard library of Python {platform.python_version()}"
    try:
        with writing_shards(folder, DataForm(vocab_size=256), provenance=provenance) as writer:
            for file in stdlib_sources(library):
                writer.append(np.frombuffer(file.read_bytes() + bytes([END_OF_FILE]), dtype=np.uint8))
            if not writer.num_tokens:
                raise DataError(str(library), "this Python has no sources of its standard library; name a data folder")
    except DataError:
        if not (folder / INDEX_NAME).exists():
            raise
        # Another process was quicker: its folder is equal.
    return folder


def stdlib_sources(library: Path) -> Iterator[Path]:
    """Yield the library's modules in the order of their names, without files that differ between equal releases."""
    files = (file for file in library.rglob("*.py") if not file.name.startswith("_sysconfigdata"))
    relative = (file.relative_to(library) for file in files)
    for file in sorted((path for path in relative if not _LEFT_OUT.intersection(path.parts)), key=Path.as_posix):
        yield library / file
