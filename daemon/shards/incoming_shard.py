"""An arriving token shard: a partial file that continues where it broke off, and is hashed as its bytes come."""

import hashlib
from pathlib import Path

from headway.daemon.errors import DamagedCopyError, RecoveryError
from headway.daemon.shards.verified_shards import CHUNK_BYTES, Advance


class IncomingShard:
    """One partial file. Every method blocks, so it belongs in a thread.

    A file that broke off stays for the next attempt. A refused one is deleted with all its bytes.
    """

    def __init__(self, partial: Path, *, size_bytes: int, sha256: str) -> None:
        """size_bytes, sha256: required of the shard. Bytes of an earlier attempt count only after `resume`."""
        self.sha256 = sha256
        self._partial = partial
        self._size_bytes = size_bytes
        self._digest = hashlib.sha256()
        self.num_bytes = 0
        """Number of bytes that are here, and hashed."""

    def resume(self, advance: Advance) -> None:
        """Hash the bytes of an earlier attempt. Raises OSError."""
        if not self._partial.exists():
            return
        if self._partial.stat().st_size > self._size_bytes:
            self._drop()
            return
        with self._partial.open("rb", buffering=0) as file:
            while chunk := file.read(CHUNK_BYTES):
                self._digest.update(chunk)
                self.num_bytes += len(chunk)
                advance(len(chunk))

    def append(self, piece: bytes, sender: str) -> None:
        """Add the next bytes. Raises RecoveryError and drops the file if they are too many or the disk is full."""
        if self.num_bytes + len(piece) > self._size_bytes:
            self._drop()
            text = f"arrived with more than the expected {self._size_bytes} bytes"
            raise RecoveryError(self._name_from(sender), text)
        try:
            with self._partial.open("ab") as file:
                file.write(piece)
        except OSError as error:
            self._drop()
            raise RecoveryError(str(self._partial.parent), error.strerror or str(error)) from error
        self._digest.update(piece)
        self.num_bytes += len(piece)

    def check(self, sender: str) -> None:
        """Check the shard. Raises RecoveryError if bytes are missing; raises DamagedCopyError, and deletes it, if the
        hash differs.

        sender: of the last bytes. Earlier bytes may have come from another node.
        """
        if self.num_bytes < self._size_bytes:
            raise RecoveryError(self._name_from(sender), f"ended after {self.num_bytes} of {self._size_bytes} bytes")
        found = self._digest.hexdigest()
        if found != self.sha256:
            self._drop()
            raise DamagedCopyError(
                self._name_from(sender), f"arrived with SHA-256 {found[:12]}…, not {self.sha256[:12]}…"
            )

    def put(self, target: Path) -> None:
        """Move the checked file into place: a reader of an older file of that name keeps it. Raises OSError."""
        self._partial.touch()  # a shard without tokens never received bytes
        self._partial.replace(target)

    def _name_from(self, sender: str) -> str:
        return f"{sender}: shard {self.sha256[:12]}…"

    def _drop(self) -> None:
        self._partial.unlink(missing_ok=True)
        self._digest = hashlib.sha256()
        self.num_bytes = 0
