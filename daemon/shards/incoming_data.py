"""An arriving data set: a folder of the cache in which shards gather, and which is a data set once its index is there.

Received bytes stay on disk, so the next attempt continues from there. A shard is hashed while it arrives and then
counts as verified; it is not read twice.
"""

import shutil
from pathlib import Path
from typing import Final

from headway.daemon.errors import RecoveryError
from headway.daemon.shards.incoming_shard import IncomingShard
from headway.daemon.shards.verified_shards import VerifiedShards
from headway.daemon.storage.file_threads import Beat
from headway.stages.data.shard_index import INDEX_NAME, DataFile, ShardIndex, read_index
from headway.stages.errors import DataError

INCOMING: Final = "incoming"
"""Folder, inside the data set's own, of unfinished files."""


class IncomingData:
    """One data set. Every method blocks, so it belongs in a thread."""

    def __init__(self, folder: Path, sha256: str, verified: VerifiedShards) -> None:
        """folder: of the cache. sha256: name of the data."""
        self._folder = folder
        self._incoming = folder / INCOMING
        self._sha256 = sha256
        self._verified = verified

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the files that are here, finished or not."""
        folders = [self._folder, self._incoming] if self._incoming.is_dir() else []
        return sum(file.stat().st_size for folder in folders for file in folder.iterdir() if file.is_file())

    def begin(self) -> ShardIndex | None:
        """Make the folder. Return the index of an earlier attempt, if there is one."""
        self._incoming.mkdir(parents=True, exist_ok=True)
        for folder in (self._folder, self._incoming):
            try:
                index = read_index(folder)
            except DataError:
                continue
            if index.sha256 == self._sha256:
                return index
        return None

    def keep_index(self, raw: bytes, sender: str) -> ShardIndex:
        """Keep the bytes of the index. Raises RecoveryError if they are not those of this data set."""
        (self._incoming / INDEX_NAME).write_bytes(raw)
        try:
            index = read_index(self._incoming)
        except DataError as error:
            raise RecoveryError(sender, f"sent an index that {error.reason}") from error
        if index.sha256 != self._sha256:
            raise RecoveryError(sender, f"sent the index of other data, {index.sha256[:12]}…")
        return index

    def require_room(self, index: ShardIndex) -> None:
        """Raise RecoveryError before a byte moves, if the data does not fit."""
        places = [self._folder / each.file for each in index.files]
        places += [self._incoming / each.sha256 for each in index.files]
        total = sum(each.num_bytes for each in index.files)
        missing = total - sum(place.stat().st_size for place in places if place.is_file())
        if missing > (free := shutil.disk_usage(self._folder).free):
            text = f"has {free / 1e9:.1f} GB free, and {missing / 1e9:.1f} GB of the data are missing"
            raise RecoveryError(str(self._folder), text)

    def is_there(self, wanted: DataFile, beat: Beat) -> bool:
        """Return whether a verified file is in place."""
        try:
            self._verified.verify_file(self._folder / wanted.file, wanted.sha256, lambda _: beat())
        except DataError:
            return False
        return True

    def shard(self, wanted: DataFile) -> IncomingShard:
        """Return the partial file of a shard."""
        return IncomingShard(self._incoming / wanted.sha256, size_bytes=wanted.num_bytes, sha256=wanted.sha256)

    def put(self, shard: IncomingShard, wanted: DataFile) -> None:
        """Move a checked file into place. Raises OSError."""
        shard.put(self._folder / wanted.file)
        self._verified.remember(self._folder / wanted.file, wanted.sha256)

    def finish(self) -> None:
        """Put the index in place, last of all: without it a folder holds no shards."""
        if (self._incoming / INDEX_NAME).exists():
            (self._incoming / INDEX_NAME).replace(self._folder / INDEX_NAME)
        shutil.rmtree(self._incoming)
