"""Finds the files that a name stands for: a file, a folder, or a pattern with `*`. The order is that of their paths."""

import glob
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from headway.daemon.errors import ConfigError

_ABOUT_A_DATA_SET: Final = ("state.json", "dataset_info.json", "dataset_dict.json", "dataset_infos.json")
_SPLIT: Final = r"train|test|valid|val|dev|eval"
_OF_SPLIT: Final = (
    re.compile(rf"(?:.+-)?(\w*(?:{_SPLIT})\w*)[-.]\d{{5}}-of-\d{{5}}\..+"),
    re.compile(rf"({_SPLIT}|validation)\.(?:jsonl|ndjson|json|csv|tsv|parquet|arrow)(?:\.\w+)?"),
)
"""Names of files that hold one split of a data set, as the Hub has them."""
_ABOUT_A_FOLDER: Final = re.compile(r"(README|LICEN[CS]E|CHANGELOG|CITATION)(\.\w+)?", re.IGNORECASE)


def find_files(name: str, split: str, tell: Callable[[str], None]) -> list[Path]:
    """Return files. tell receives what is passed over. Raises ConfigError when there are none.

    split: of a folder that has several.
    """
    path = Path(name)
    if path.is_dir():
        return _in_folder(path, split, tell)
    if path.is_file():
        return [path]
    if path.exists():
        raise ConfigError("is a pipe, a socket or a device; write its text to a file first", name)
    matches = glob.glob(name, recursive=True) if glob.has_magic(name) else []  # noqa: PTH207 - names may be absolute
    found: dict[Path, None] = {}
    for match in sorted(map(Path, matches), key=Path.as_posix):
        found |= dict.fromkeys(_in_folder(match, split, tell) if match.is_dir() else [match] if match.is_file() else [])
    if not found:
        what = "no file has such a name" if glob.has_magic(name) else "no such file or folder"
        raise ConfigError(f"{what} (a Hugging Face data set is written hf:NAME)", name)
    return list(found)


def _in_folder(folder: Path, split: str, tell: Callable[[str], None]) -> list[Path]:
    folder = _folder_of_split(folder, split)
    every = sorted((file for file in folder.rglob("*") if file.is_file()), key=Path.as_posix)
    wanted = _without_descriptions([file for file in every if not _is_hidden(file.relative_to(folder))])
    texts = [file for file in wanted if not _ABOUT_A_FOLDER.fullmatch(file.name)] or wanted
    passed = [file for file in every if file not in set(texts)]
    if passed:
        named = ", ".join(str(file.relative_to(folder)) for file in passed[:5])
        more = f" and {len(passed) - 5:,} more" if len(passed) > 5 else ""
        tell(f"{folder}: passes over {named}{more}: hidden, or about the folder; name a file to read it")
    if not texts:
        raise ConfigError("this folder holds no files" + (" but hidden ones" if every else ""), str(folder))
    return _of_split(texts, split, folder, tell)


def _of_split(files: list[Path], split: str, folder: Path, tell: Callable[[str], None]) -> list[Path]:
    """Return the files of one split and those of none, if names tell several. Raises ConfigError: not this one."""
    splits = {file: match[1] for file in files for name in _OF_SPLIT if (match := name.fullmatch(file.name))}
    there = sorted(set(splits.values()))
    if len(there) < 2:
        return files
    if split not in there:
        raise ConfigError(f"has no split {split!r}; there are {', '.join(there)}: name one with --split", str(folder))
    others = ", ".join(name for name in there if name != split)
    tell(f"{folder}: takes the split {split}, and leaves out {others}; --split or a pattern of names takes others")
    return [file for file in files if splits.get(file, split) == split]


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _without_descriptions(files: Iterable[Path]) -> list[Path]:
    """Return a folder's files, except those with which `datasets` describes the others."""
    every = list(files)
    saved = {file.parent for file in every if file.suffix in (".arrow", ".parquet")}
    saved |= {folder.parent for folder in saved}
    return [file for file in every if file.name not in _ABOUT_A_DATA_SET or file.parent not in saved]


def _folder_of_split(folder: Path, split: str) -> Path:
    """Return the folder of one split of a saved `DatasetDict`; any other folder is itself. Raises ConfigError."""
    description = folder / "dataset_dict.json"
    if not description.is_file():
        return folder
    try:
        splits = [str(name) for name in json.loads(description.read_text(encoding="utf-8"))["splits"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"cannot be read: {error}", str(description)) from error
    if split not in splits or not (folder / split).is_dir():
        raise ConfigError(f"has no split {split!r}; there are {', '.join(splits)}: name one with --split", str(folder))
    return folder / split
