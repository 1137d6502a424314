"""Checks files that are about to become training data, and warns about those that do not look like text."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from headway.daemon.data.text_sources import HUGGING_FACE_PREFIX

LOOK_BYTES: Final = 64 << 10
"""Bytes read at the beginning of each file."""
MAX_FILES: Final = 1000


def doubts(sources: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each file that is empty or does not begin as text. The reader reports unreadable files."""
    for path in _files(sources):
        try:
            with path.open("rb") as file:
                head = file.read(LOOK_BYTES)
        except OSError:
            continue
        if not head:
            yield f"{path}: is empty"
        elif path.suffix not in (".parquet", ".arrow") and (reason := _why_no_text(head)):
            yield f"{path}: does not look like text ({reason}); it is taken as it is"


def _why_no_text(head: bytes) -> str:
    if b"\0" in head:
        return f"a zero byte at {head.index(0)}"
    try:
        head.decode()
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4:  # otherwise the sample ends inside a character
            return f"not UTF-8 at byte {error.start}"
    return ""


def _files(sources: Sequence[str]) -> Iterator[Path]:
    for name in sources:
        path = Path(name)
        if name.startswith(HUGGING_FACE_PREFIX):
            continue
        if path.is_dir():
            yield from sorted(file for file in path.rglob("*") if file.is_file())[:MAX_FILES]
        elif path.is_file():  # a pipe has no beginning that could be read twice
            yield path
