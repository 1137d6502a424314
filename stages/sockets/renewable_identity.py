"""An identity that is renewed while its process runs: a short-lived certificate must not end a long job.

Connections that are open stay as they are. Whatever dials, and whatever answers a handshake, asks for the newest
certificate first (`credentials.py`).
"""

from pathlib import Path
from typing import Final

from headway.stages.sockets.tls_identity import CERTIFICATE_FILE, KEY_FILE, TlsIdentity

NEWEST: Final = "newest"
"""A link in the folder of renewals to the one that counts. It changes in one step, with certificate and key."""


class RenewableIdentity:
    """The identity in a folder, or the newest one in the folder of its renewals. For any thread."""

    def __init__(self, folder: Path, renewals: Path) -> None:
        """Raises OSError, naming the missing file."""
        self._newest = renewals / NEWEST
        self._first = self._identity = TlsIdentity.read(folder)
        self._seen = ""

    def now(self) -> TlsIdentity:
        """Return the identity that counts now. While a new one cannot be read, the one before counts."""
        try:
            name = str(self._newest.readlink())
            if name != self._seen:
                folder = self._newest.parent / name
                pair = (folder / CERTIFICATE_FILE).read_bytes(), (folder / KEY_FILE).read_bytes()
                self._identity, self._seen = TlsIdentity(self._first.ca, *pair), name
        except OSError:
            pass
        return self._identity
