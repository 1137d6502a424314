"""The size and the checksum of a file, by which every copy of it is known. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """Size and checksum of one file. The files of worker, store, records and checkpoints all have one."""

    size_bytes: int
    checksum: str
    """Checksum of the content: the result of `content_checksum`."""

    @property
    def digest(self) -> "FileDigest":
        """Return size and checksum alone."""
        return FileDigest(size_bytes=self.size_bytes, checksum=self.checksum)
