"""Writes token shards: a folder that appears complete or not at all.

    with writing_shards(out, DataForm(vocab_size=V, has_flags=True, row_tokens=129)) as writer:
        writer.append(tokens, flags)               # to train on
        writer.validation.append(tokens, flags)    # held out; a folder may have none

With rows, what is appended to a split is whole rows in the end, and no file ends inside a row.

`ShardWriter(folder, form)` writes a folder that outlives its process. A later one goes on from the `state` of both
splits with `resume`. `publish` gives the complete folder its name.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final

import numpy as np
import numpy.typing as npt

from headway.stages.data.shard_index import (
    BEGINS_DOCUMENT,
    INDEX_NAME,
    IS_TARGET,
    Shard,
    ShardIndex,
    combined_sha256,
    narrowest_dtype,
    write_index,
)
from headway.stages.errors import DataError

SHARD_TOKENS: Final = 1 << 28
"""Most tokens of one file, unless told otherwise."""
_BLOCK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DataForm:
    """What all shards of a folder have in common."""

    vocab_size: int
    most_tokens: int = SHARD_TOKENS
    """Of one file."""
    has_flags: bool = False
    """Each token has flags, IS_TARGET and BEGINS_DOCUMENT."""
    row_tokens: int = 0
    """Length of the rows; 0: one stream."""
    holds_pairs: bool = False

    @property
    def shard_tokens(self) -> int:
        """Return the tokens of one file, which does not end inside a row."""
        return max(self.most_tokens // self.row_tokens, 1) * self.row_tokens if self.row_tokens else self.most_tokens

    @property
    def dtype(self) -> str:
        """Return the type of the tokens."""
        return narrowest_dtype(self.vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitState:
    """What of a split is durable."""

    shards: tuple[Shard, ...] = ()
    growing: Shard | None = None
    """The beginning of a further shard."""


class SplitWriter:
    """Cuts one split's tokens into files."""

    def __init__(self, folder: Path, form: DataForm, *, prefix: str) -> None:
        self.num_tokens = 0
        """Number of tokens written so far."""
        self.folder = folder
        """Folder of the growing files; further files of the data, such as a tokenizer, may be put here."""
        self.form = form
        self._prefix = prefix
        self._shards: list[Shard] = []
        self._tokens: _HashedFile | None = None
        self._flags: _HashedFile | None = None
        self._in_shard = 0

    def append(self, tokens: npt.NDArray[np.integer], flags: npt.NDArray[np.integer] | None = None) -> None:
        """Append tokens of any integer type, and a byte of flags for each if the data has flags.

        Raises DataError: a token outside the vocabulary, an unknown flag.
        """
        assert (flags is not None) == self.form.has_flags, "flags are for all tokens or for none"
        assert flags is None or len(flags) == len(tokens), "each token has its flags"
        if not len(tokens):
            return
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.form.vocab_size:
            raise DataError(str(self.folder), f"a token lies outside the vocabulary of {self.form.vocab_size}")
        if flags is not None and not 0 <= int(flags.min()) <= int(flags.max()) <= IS_TARGET | BEGINS_DOCUMENT:
            raise DataError(str(self.folder), "a token has flags that are not known")
        narrow = np.ascontiguousarray(tokens, dtype=np.dtype(self.form.dtype).newbyteorder("<"))
        beside = None if flags is None else np.ascontiguousarray(flags, dtype=np.uint8)
        while len(narrow):
            room = self.form.shard_tokens - self._in_shard
            self._write(narrow[:room], None if beside is None else beside[:room])
            narrow, beside = narrow[room:], None if beside is None else beside[room:]

    def finish(self) -> tuple[Shard, ...]:
        """End the last shard and return all. Raises DataError when a row is not whole."""
        if self.form.row_tokens and self.num_tokens % self.form.row_tokens:
            raise DataError(str(self.folder), f"{self.num_tokens} tokens are no whole rows of {self.form.row_tokens}")
        self._end_shard()
        return tuple(self._shards)

    def state(self) -> SplitState:
        """Make all that was appended durable, and return what it is."""
        if self._tokens is None:
            return SplitState(shards=tuple(self._shards))
        growing = Shard(file=self._tokens.name, num_tokens=self._in_shard, sha256=self._tokens.sync())
        if self._flags is not None:
            growing = replace(growing, flags=self._flags.name, flags_sha256=self._flags.sync())
        return SplitState(shards=tuple(self._shards), growing=growing)

    def resume(self, state: SplitState) -> None:
        """Go on after a state of an earlier writer of this folder. Raises DataError when a file is not as it was."""
        for shard in state.shards:
            for file in self._reopened(shard):
                file.close()
        self._shards = list(state.shards)
        self.num_tokens = sum(shard.num_tokens for shard in state.shards)
        if state.growing is not None:
            self._tokens, *flags = self._reopened(state.growing)
            self._flags = flags[0] if flags else None
            self._in_shard = state.growing.num_tokens
            self.num_tokens += self._in_shard

    def _reopened(self, shard: Shard) -> list["_HashedFile"]:
        width = np.dtype(self.form.dtype).itemsize
        found = [_HashedFile.reopen(self.folder / shard.file, shard.num_tokens * width, shard.sha256)]
        if shard.flags:
            found.append(_HashedFile.reopen(self.folder / shard.flags, shard.num_tokens, shard.flags_sha256))
        return found

    def abandon(self) -> None:
        """Close the open files. Idempotent."""
        for file in (self._tokens, self._flags):
            if file is not None:
                file.close()

    def _write(self, tokens: npt.NDArray[np.integer], flags: npt.NDArray[np.uint8] | None) -> None:
        if self._tokens is None:
            self._tokens = _HashedFile(self.folder / f"{self._prefix}-{len(self._shards):05d}.bin")
        self._tokens.write(tokens.tobytes())
        if flags is not None:
            if self._flags is None:
                self._flags = _HashedFile(self.folder / f"{self._prefix}-{len(self._shards):05d}.flags")
            self._flags.write(flags.tobytes())
        self._in_shard += len(tokens)
        self.num_tokens += len(tokens)
        if self._in_shard == self.form.shard_tokens:
            self._end_shard()

    def _end_shard(self) -> None:
        if self._tokens is None:
            return
        shard = Shard(file=self._tokens.name, num_tokens=self._in_shard, sha256=self._tokens.end())
        if self._flags is not None:
            shard = replace(shard, flags=self._flags.name, flags_sha256=self._flags.end())
        self._shards.append(shard)
        self._tokens, self._flags, self._in_shard = None, None, 0


class ShardWriter(SplitWriter):
    """Writes what is trained on, and beside it a validation split. Made by `writing_shards`."""

    def __init__(self, folder: Path, form: DataForm) -> None:
        super().__init__(folder, form, prefix="shard")
        self.validation = SplitWriter(folder, form, prefix="validation")

    def close(self, *, tokenizer: str, provenance: str) -> ShardIndex:
        """End the last shards and write the index."""
        shards, validation, form = self.finish(), self.validation.finish(), self.form
        index = ShardIndex(
            dtype=form.dtype,
            vocab_size=form.vocab_size,
            shards=shards,
            tokenizer=tokenizer,
            provenance=provenance,
            row_tokens=form.row_tokens,
            holds_pairs=form.holds_pairs,
            validation=validation,
            format=3 if form.holds_pairs else 2 if form.has_flags or form.row_tokens or validation else 1,
        )
        index = replace(index, sha256=combined_sha256(index))
        write_index(self.folder, index)
        return index

    def abandon(self) -> None:
        """Close the open files. Idempotent."""
        super().abandon()
        self.validation.abandon()


class _HashedFile:
    """A new file whose bytes are hashed while they are written."""

    def __init__(self, path: Path, *, is_new: bool = True) -> None:
        self.name = path.name
        self._file: BinaryIO = path.open("xb" if is_new else "r+b")
        self._hash = hashlib.sha256()

    @classmethod
    def reopen(cls, path: Path, num_bytes: int, sha256: str) -> "_HashedFile":
        """Go on after a file's first bytes, and drop the rest. Raises DataError when they are not the ones."""
        try:
            found = cls(path, is_new=False)
        except OSError as error:
            raise DataError(str(path), f"cannot be opened: {error.strerror}") from error
        left = num_bytes
        while left and (block := found._file.read(min(left, _BLOCK_BYTES))):
            found._hash.update(block)
            left -= len(block)
        if left or found._hash.hexdigest() != sha256:
            found.close()
            raise DataError(str(path), "is not as it was")
        found._file.truncate(num_bytes)
        found._file.seek(num_bytes)
        return found

    def write(self, raw: bytes) -> None:
        self._file.write(raw)
        self._hash.update(raw)

    def sync(self) -> str:
        """Make what is written durable. Returns its SHA-256."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._hash.hexdigest()

    def end(self) -> str:
        """Make it durable, and close it. Returns its SHA-256."""
        sha256 = self.sync()
        self._file.close()
        return sha256

    def close(self) -> None:
        self._file.close()


def publish(folder: Path, out: Path) -> None:
    """Give a complete data folder its name. Raises DataError when another was quicker."""
    folder.chmod(0o755)
    try:
        folder.rename(out)
    except OSError as error:
        if not (out / INDEX_NAME).exists():
            raise
        raise DataError(str(out), "exists already; name another folder, or remove it first") from error


@contextmanager
def writing_shards(
    out: Path,
    form: DataForm,
    *,
    tokenizer: str = "bytes",
    provenance: str = "",
) -> Iterator[ShardWriter]:
    """Write a data folder: `out` appears, complete, when the block ends without an exception.

    Several processes may write one folder at once. The first to end wins, and the others raise DataError, as does a
    process that finds `out` there already.
    """
    if out.exists():
        raise DataError(str(out), "exists already; name another folder, or remove it first")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    except OSError as error:
        raise DataError(str(out), f"cannot be written to: {error.strerror}; name another folder") from error
    writer = ShardWriter(folder, form)
    try:
        yield writer
        writer.close(tokenizer=tokenizer, provenance=provenance)
        publish(folder, out)
    finally:
        writer.abandon()
        shutil.rmtree(folder, ignore_errors=True)
