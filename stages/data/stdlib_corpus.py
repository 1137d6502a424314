"""The built-in data, as byte tokens.

`headway-docs` is Headway's documentation as it was once: 0.2 MB of English, equal everywhere. `python-stdlib` is the
sources of the running Python's standard library: equal Python releases give equal bytes. Nodes with different ones
disagree about the SHA-256, and report it.
"""

import gzip
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from headway.stages.data.shard_index import INDEX_NAME
from headway.stages.data.shard_writer import DataForm, writing_shards
from headway.stages.data.source_choice import HEADWAY_DOCS, STDLIB
from headway.stages.errors import DataError

DOCS_FILE = Path(__file__).with_name("headway_docs.txt.gz")
"""Never changed: `docs/jobs/small.toml` has an expected loss on it."""
END_OF_FILE = 0
"""The token between two files: a byte that no source contains."""
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"})
"""Installed packages, tests, and parts that distributions package separately."""


def builtin_corpus(cache_dir: Path) -> Path:
    """Return the folder of the standard library's token shards, below `cache_dir`; the first caller writes it.

    About 11 MB. Safe with several processes at once. Raises DataError when this Python came without its sources.
    """
    release = platform.python_version()
    library = Path(sysconfig.get_path("stdlib"))
    texts = (file.read_bytes() + bytes([END_OF_FILE]) for file in stdlib_sources(library))
    what = "this Python has no sources of its standard library; name a data folder"
    return _written(
        cache_dir / f"{STDLIB}-{release}-v1",
        texts,
        provenance=f"sources of the standard library of Python {release}",
        if_empty=DataError(str(library), what),
    )


def docs_corpus(cache_dir: Path) -> Path:
    """Return the folder of the documentation's token shards, below `cache_dir`; the first caller writes it."""
    texts = (gzip.decompress(path.read_bytes()) for path in [DOCS_FILE])
    empty = DataError(str(DOCS_FILE), "is empty; install Headway again")
    return _written(cache_dir / f"{HEADWAY_DOCS}-v1", texts, provenance="Headway's documentation", if_empty=empty)


def _written(folder: Path, texts: Iterator[bytes], *, provenance: str, if_empty: DataError) -> Path:
    """Return the folder, with the texts as its tokens if it is new. Raises DataError."""
    if (folder / INDEX_NAME).exists():
        return folder
    try:
        with writing_shards(folder, DataForm(vocab_size=256), provenance=provenance) as writer:
            for text in texts:
                writer.append(np.frombuffer(text, dtype=np.uint8))
            if not writer.num_tokens:
                raise if_empty
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
