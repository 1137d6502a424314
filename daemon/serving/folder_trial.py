"""Tests for a client whether this node can write to a checkpoint folder, before the job that names it is submitted."""

from typing import Final

from headway.daemon.errors import ConfigError, NoAccessError, RecoveryError
from headway.daemon.jobs.places import is_store, why_no_place
from headway.daemon.storage.checkpoint import probe
from headway.daemon.storage.file_threads import FileThreads
from headway.proto import control_pb2

SILENCE_S: Final = 10.0
"""Seconds of silence after which a store counts as out of reach: a user waits at a terminal."""


class FolderTrial:
    """The trial of one daemon. Folders of its own tree of files are not tried: they would appear where they
    should not.
    """

    def __init__(self) -> None:
        self._threads = FileThreads("trial of checkpoint folders", silence_s=SILENCE_S, most_hung=1)

    async def answer(self, checkpoint_dir: str) -> control_pb2.TryFolderReply:
        """Return why this node cannot write there, if it cannot. Raises ConfigError if the URL is no store's."""
        if why := why_no_place(checkpoint_dir):
            raise ConfigError(why, "checkpoint_dir")
        if not is_store(checkpoint_dir):
            raise ConfigError(f"{checkpoint_dir!r} is not the URL of a store", "checkpoint_dir")
        url = checkpoint_dir.rstrip("/")
        try:
            await self._threads.run(url, lambda _: probe(url))
        except RecoveryError as error:
            return control_pb2.TryFolderReply(reason=error.reason, lacks_access=isinstance(error, NoAccessError))
        return control_pb2.TryFolderReply()
