"""Writes token shards: a folder that appears complete or not at all."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from headway.stages.data.tokens import INDEX_NAME, Shard, ShardIndex, combined_sha256, narrowest_dtype, write_index
from headway.stages.errors import DataError


class ShardWriter:
    """Cuts a stream of tokens into files. Made by `writing_shards`."""

    def __init__(self, folder: Path, *, vocab_size: int, shard_tokens: int) -> None:
        self.num_tokens = 0
        """Number of tokens written so far."""
        self.folder = folder
        """Folder of the growing files; further files of the data, such as a tokenizer, may be put here."""
        self._vocab_size = vocab_size
        self._dtype = narrowest_dtype(vocab_size)
        self._shard_tokens = shard_tokens
        self._shards: list[Shard] = []
        self._file: BinaryIO | None = None
        self._hash = hashlib.sha256()
        self._in_shard = 0

    def append(self, tokens: npt.NDArray[np.integer]) -> None:
        """Append tokens of any integer type. Raises DataError for one outside the vocabulary."""
        if not len(tokens):
            return
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._vocab_size:
            raise DataError(str(self.folder), f"a token lies outside the vocabulary of {self._vocab_size}")
        narrow = np.ascontiguousarray(tokens, dtype=np.dtype(self._dtype).newbyteorder("<"))
        while len(narrow):
            piece = narrow[: self._shard_tokens - self._in_shard]
            self._write(piece.tobytes(), len(piece))
            narrow = narrow[len(piece) :]

    def close(self, *, tokenizer: str, provenance: str) -> ShardIndex:
        """End the last shard and write the index."""
        self._end_shard()
        index = ShardIndex(
            dtype=self._dtype,
            vocab_size=self._vocab_size,
            shards=tuple(self._shards),
            sha256=combined_sha256(self._dtype, self._shards),
            tokenizer=tokenizer,
            provenance=provenance,
        )
        write_index(self.folder, index)
        return index

    def abandon(self) -> None:
        """Close the open file. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, raw: bytes, num_tokens: int) -> None:
        if self._file is None:
            self._file = (self.folder / self._file_name()).open("xb")
        self._file.write(raw)
        self._hash.update(raw)
        self._in_shard += num_tokens
        self.num_tokens += num_tokens
        if self._in_shard == self._shard_tokens:
            self._end_shard()

    def _end_shard(self) -> None:
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._shards.append(Shard(file=self._file_name(), num_tokens=self._in_shard, sha256=self._hash.hexdigest()))
        self._file, self._hash, self._in_shard = None, hashlib.sha256(), 0

    def _file_name(self) -> str:
        return f"shard-{len(self._shards):05d}.bin"


@contextmanager
def writing_shards(
    out: Path, *, vocab_size: int, tokenizer: str = "bytes", provenance: str = "", shard_tokens: int = 1 << 28
) -> Iterator[ShardWriter]:
    """Write a data folder: `out` appears, complete, when the block ends without an exception.

    Several processes may write one folder at once. The first to end wins, and the others raise DataError, as does a
    process that finds `out` there already.
    """
    if out.exists():
        raise DataError(str(out), "exists already")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    except OSError as error:
        raise DataError(str(out), f"cannot be written to: {error.strerror}; name another folder") from error
    writer = ShardWriter(folder, vocab_size=vocab_size, shard_tokens=shard_tokens)
    try:
        yield writer
        writer.close(tokenizer=tokenizer, provenance=provenance)
        folder.chmod(0o755)
        try:
            folder.rename(out)
        except OSError as error:
            if not (out / INDEX_NAME).exists():
                raise
            raise DataError(str(out), "exists already") from error
    finally:
        writer.abandon()
        shutil.rmtree(folder, ignore_errors=True)
