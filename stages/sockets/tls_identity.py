"""The identity of a process towards its peers: one certificate, its key and the authority that signed it, as PEM bytes.

The rule for certificates: that of a node bears the node's name, and all its processes present it. A client that dials a
node expects that name at any address, so a node may change its address. A server requires a certificate of each client.
A message that only one node may send is checked against the names in the client's certificate, and its roles (roles.py)
say what else the client may ask for.

A short-lived certificate must not end a long job, so an identity may be renewed while its process runs. Connections
that are open stay as they are. Whatever dials, and whatever answers a handshake, asks for the newest certificate first.
"""

import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol

import grpc

from headway.stages.sockets.roles import Role, holder, roles_among, without_roles

CA_FILE = "ca.pem"
CERTIFICATE_FILE = "cert.pem"
KEY_FILE = "key.pem"
NEWEST: Final = "newest"
"""A link in the folder of renewals to the one that counts. It changes in one step, with certificate and key."""
_BEGIN: Final = b"-----BEGIN CERTIFICATE-----"
_END: Final = b"-----END CERTIFICATE-----"


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """PEM bytes of the authority's certificate, of this process's certificate and of its private key."""

    ca: bytes
    certificate: bytes
    key: bytes = field(repr=False)

    @classmethod
    def read(cls, directory: Path) -> "TlsIdentity":
        """Read the identity in a folder with ca.pem, cert.pem and key.pem. Raises OSError, naming the missing file."""
        return cls(
            (directory / CA_FILE).read_bytes(),
            (directory / CERTIFICATE_FILE).read_bytes(),
            (directory / KEY_FILE).read_bytes(),
        )

    def now(self) -> "TlsIdentity":
        """Return itself: it is never renewed."""
        return self


class Identity(Protocol):
    """Whoever knows a process's identity: a TlsIdentity itself, or one that is renewed."""

    def now(self) -> TlsIdentity:
        """Return the identity that counts now; the same object until it is another one."""
        ...


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


def dialling(identity: Identity) -> grpc.ChannelCredentials:
    """Return what a channel needs that is opened now."""
    own = identity.now()
    return grpc.ssl_channel_credentials(own.ca, own.key or None, own.certificate or None)


def serving(identity: Identity) -> grpc.ServerCredentials:
    """Return what one port of a server needs, which asks for a certificate of each client, and shows its newest one."""
    shown = identity.now()
    changing = threading.Lock()

    def newest() -> grpc.ServerCertificateConfiguration | None:
        """Return another configuration once, after a renewal. For any other answer than None gRPC frees the present one
        at once, also under the handshakes that use it in its other threads.
        """
        nonlocal shown
        with changing:
            if (now := identity.now()) is shown:
                return None
            shown = now
            return _configuration(now)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(shown),
        newest,  # type: ignore[arg-type]  # the stubs do not know of None
        require_client_authentication=True,
    )


def _configuration(own: TlsIdentity) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(own.key, own.certificate)], root_certificates=own.ca)


def expecting(name: str) -> tuple[tuple[str, str], ...]:
    """Return the options of a channel to a server whose certificate has to bear a name; an empty one: the
    dialled host.
    """
    return (("grpc.ssl_target_name_override", name),) if name else ()


def names_of_client(auth_context: Mapping[str, Iterable[bytes]]) -> tuple[str, ...]:
    """Return the names in a client's certificate, as gRPC reports them for a call."""
    return tuple(name.decode(errors="replace") for name in auth_context.get("x509_subject_alternative_name", ()))


def certificate_of_client(auth_context: Mapping[str, Iterable[bytes]]) -> bytes:
    """Return a client's certificate in PEM, as gRPC reports it for a call; empty: it has none."""
    return next(iter(auth_context.get("x509_pem_cert", ())), b"")


def other_node(name: str, names: Iterable[str]) -> str:
    """Return why a client is refused: it sends what only the node of a name may send."""
    names = tuple(names)
    told = ", ".join(without_roles(names)) if Role.NODE in roles_among(names) else holder(names)
    return f"the certificate of {told or 'nobody'} is not that of node {name}"


def is_borne(name: str, names: Iterable[str]) -> bool:
    """Return whether a certificate with these names is that of a node: case does not matter, as for names of hosts."""
    names = tuple(names)
    return Role.NODE in roles_among(names) and name.casefold() in (other.casefold() for other in names)
