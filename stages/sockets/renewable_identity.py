"""An identity that is renewed while its process runs: a short-lived certificate must not end a long job.

Connections that are open stay as they are. Whatever dials, and whatever answers a handshake, asks for the newest
certificate first (`credentials.py`).
"""

import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from headway.stages.sockets.tls_identity import CA_FILE, CERTIFICATE_FILE, KEY_FILE, TlsIdentity

_BEGIN: Final = b"-----BEGIN CERTIFICATE-----"
_END: Final = b"-----END CERTIFICATE-----"
NEWEST: Final = "newest"
"""A link in the folder of renewals to the one that counts. It changes in one step, with certificate and key."""


class RenewableIdentity:
    """The identity in a folder, or the newest one in the folder of its renewals. For any thread.

    The authorities that it trusts are those of the folder's ca.pem, also when that changes: one follows another.
    """

    def __init__(self, folder: Path, renewals: Path) -> None:
        """Raises OSError, naming the missing file."""
        self._newest, self._ca = renewals / NEWEST, folder / CA_FILE
        self._identity = TlsIdentity.read(folder)
        self._seen, self._seen_ca = "", self._state_of_ca()
        self._changing = threading.Lock()

    def now(self) -> TlsIdentity:
        """Return the identity that counts now. While a new one cannot be read, the one before counts."""
        with self._changing:
            with suppress(OSError):
                self._take_renewed()
            with suppress(OSError):
                self._take_authorities()
            return self._identity

    def _take_renewed(self) -> None:
        name = str(self._newest.readlink())
        if name != self._seen:
            folder = self._newest.parent / name
            pair = (folder / CERTIFICATE_FILE).read_bytes(), (folder / KEY_FILE).read_bytes()
            self._identity, self._seen = TlsIdentity(self._identity.ca, *pair), name

    def _take_authorities(self) -> None:
        state = self._state_of_ca()
        if state == self._seen_ca:
            return
        ca = self._ca.read_bytes()
        # Half a file, which somebody is copying, is not what anybody wants to trust.
        if ca != self._identity.ca and ca.count(_BEGIN) == ca.count(_END) > 0:
            self._identity = replace(self._identity, ca=ca)
        self._seen_ca = state

    def _state_of_ca(self) -> tuple[int, int, int]:
        found = self._ca.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino
