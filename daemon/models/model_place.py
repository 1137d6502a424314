"""Decides where a model folder may be put, and how a finished one replaces an older one."""

import re
import secrets
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec
from safetensors import SafetensorError

from headway.daemon.base.errors import ConfigError
from headway.daemon.base.file_system import sentence
from headway.daemon.base.owned_folders import OwnedFolder, remove_ownerless

CONFIG_NAME: Final = "config.json"
INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"
MARK_NAME: Final = "headway.json"
"""File of a folder of adapters with the `producer`, because PEFT knows no such key, the base model and the last
batch."""
PRODUCER: Final = "headway"
"""Value of `producer` in config.json of a folder that may be replaced."""

_FILES: Final = ".headway-files"
"""File of an export with the names of all others that it wrote."""
_DRAFT: Final = ".export-"
_MODEL_FILE: Final = re.compile(
    r"config\.json|generation_config\.json|tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\..*|merges\.txt"
    r"|chat_template\..*"
    r"|headway\.json|adapter_.*|.*\.(safetensors|safetensors\.index\.json|bin|bin\.index\.json|pt|pth|msgpack|h5|gguf)"
)
"""Files that AutoModel or AutoTokenizer may open: none of an older model may stay with a newer one."""
_OURS: Final = re.compile(
    r"config\.json|model\.safetensors\.index\.json|model-\d+-of-\d+\.safetensors|tokenizer\.json|tokenizer_config\.json"
    r"|adapter_config\.json|adapter_model\.safetensors|headway\.json"
    r"|generation_config\.json|tokenizer\.model|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
    r"|chat_template\.(jinja|json)"
)


def make_out(out: Path, model: Path) -> None:
    """Make the folder of a run's output, and say on stderr if its model will replace one. Raises ConfigError."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot be written to: {error.strerror}; name another folder with --out", str(out)
        ) from error
    if check_place(model):
        sys.stderr.write(f"headway: {replaced(model)}\n")


def replaced(folder: Path) -> str:
    """Return what to say of a folder for which `check_place` is True."""
    return f"{folder} holds a model, which the new one replaces when it is complete"


def check_place(folder: Path, *, force: bool = False) -> bool:
    """Return whether a folder has a model, which will be replaced.

    An earlier export may be, and files that belong to no model stay. force: another model may be replaced too. Raises
    ConfigError for a folder that cannot be written to, or whose files a model would hide or delete.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith(_DRAFT))
    except OSError as error:
        raise ConfigError(f"cannot be written to: {error.strerror}", str(folder)) from error
    if force:
        return any(_MODEL_FILE.fullmatch(name) for name in names)
    is_ours = PRODUCER in (_producer(folder / CONFIG_NAME), _producer(folder / MARK_NAME))
    # Beside an index, AutoModel would load a model.safetensors that is not ours.
    own_single = SINGLE_NAME if INDEX_NAME not in names else ""
    own = _listed(folder)
    if own is None:
        own = {own_single, *filter(_OURS.fullmatch, names)}
    foreign = [name for name in names if _MODEL_FILE.fullmatch(name) and not (is_ours and name in own)]
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        what = f"holds {foreign[0]}{more} of a model that was not exported here"
        raise ConfigError(
            f"{what}; name another folder, move what you need away, or use `headway export --force`", str(folder)
        )
    return is_ours


@contextmanager
def told_of(folder: Path) -> Iterator[None]:
    """Translate an error of the folder's file system, such as a full disk, into ConfigError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot be written to: {sentence(error)}", str(folder)) from error


class Draft:
    """A hidden folder for a model that is being written: inside its place, hence on that file system.

    A killed process's draft is deleted with the next one. A complete one is never deleted: from then on, the old
    content may be gone.
    """

    def __init__(self, place: Path) -> None:
        remove_ownerless(place, prefix=_DRAFT)
        self.folder = place / f"{_DRAFT}{secrets.token_hex(4)}"
        self._place = place
        self._is_whole = False
        self._owned = OwnedFolder(self.folder)
        self._owned.claim()
        self.folder.mkdir()

    def put_in_place(self) -> None:
        """Replace the old model by this complete one. Raises ConfigError, naming the draft, which then stays."""
        with told_of(self._place):
            _list_files(self.folder)
        self._is_whole = True
        self._owned.release()
        try:
            put_in_place(self.folder, self._place)
        except OSError as error:
            what = f"its older model cannot be replaced: {error.filename}: {sentence(error)}"
            raise ConfigError(f"{what}; the new one is in {self.folder}", str(self._place)) from error

    def drop(self) -> None:
        """Delete the files of an incomplete model."""
        if not self._is_whole:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._owned.release()


class DraftedFolder(ABC):
    """A model folder that is written as a draft. `close` puts it in place, as does the end of its context, unless by
    an error.
    """

    _draft: Draft
    is_replacing: bool
    """Whether the folder has a model that this one will replace."""

    @property
    def draft(self) -> Path:
        """Return the folder that is written to; the caller removes its own files before `close`."""
        return self._draft.folder

    @abstractmethod
    def close(self) -> None:
        """Put the whole folder in its place. Raises ConfigError."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self._draft.drop()


def put_in_place(draft: Path, folder: Path) -> None:
    """Replace the model in a folder by the complete one in a draft; the draft is gone then.

    The old index, or single file, goes first and the new one comes last. A crash in between leaves no model, never a
    mixture of two.
    """
    old = [entry.name for entry in folder.iterdir() if entry.is_file() and _MODEL_FILE.fullmatch(entry.name)]
    new = [entry.name for entry in draft.iterdir()]
    for name in _last(old)[::-1]:
        (folder / name).unlink()
    for name in _last(new):
        (draft / name).replace(folder / name)
    draft.rmdir()


def share_mode(files: Iterable[Path], like: Path) -> None:
    """Give files the mode of a new file here: a library may have made them for their owner alone."""
    mode = like.stat().st_mode & 0o777
    for file in files:
        file.chmod(mode)


def _last(names: list[str]) -> list[str]:
    """Return names with that file at the end without which a folder has no weights."""
    return sorted(names, key=lambda name: (name in (INDEX_NAME, SINGLE_NAME), name == INDEX_NAME, name))


def _list_files(draft: Path) -> None:
    """Write down which files an export has: what somebody adds later under such a name is not ours."""
    names = sorted(entry.name for entry in draft.iterdir())
    (draft / _FILES).write_text("".join(f"{name}\n" for name in names), encoding="utf-8")


def _listed(folder: Path) -> set[str] | None:
    """Return the names of the files that an export has written; None: an older one did not list them."""
    try:
        return set((folder / _FILES).read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError):
        return None


def _producer(config: Path) -> object:
    try:
        raw: Any = msgspec.json.decode(config.read_bytes())
    except (OSError, msgspec.DecodeError, RecursionError):
        return None
    return raw.get("producer") if isinstance(raw, dict) else None
