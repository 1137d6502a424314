"""The identity of a process towards its peers: one certificate, its key and the authority that signed it, as PEM bytes.

The rule for certificates: that of a node bears the node's name, and all its processes present it. A client that dials a
node expects that name at any address, so a node may change its address. A server requires a certificate of each client.
A message that only one node may send is checked against the names in the client's certificate, and its roles (roles.py)
say what else the client may ask for.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headway.stages.sockets.roles import Role, holder, roles_among, without_roles

CA_FILE = "ca.pem"
CERTIFICATE_FILE = "cert.pem"
KEY_FILE = "key.pem"


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
