"""Who a process is to its peers: one certificate, its key and the authority that signed it, as PEM bytes.

The rule for certificates: every one that Headway issues carries the DNS name `headway` (SERVER_NAME) beside whatever
hosts and addresses its node has, and every client checks for that name instead of the address it dials, through
CHANNEL_OPTIONS. So a node may change its address, and a certificate still proves that the authority knows its holder.
Both sides of every connection present one: servers require and verify a client's.
"""

from dataclasses import dataclass, field
from pathlib import Path

SERVER_NAME = "headway"
"""A subject alternative name of every certificate; what a client expects a server to be."""

CHANNEL_OPTIONS = (("grpc.ssl_target_name_override", SERVER_NAME),)
"""To be among the options of every channel that is made with a TlsIdentity."""

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
        """The identity in a folder with ca.pem, cert.pem and key.pem. Raises OSError, naming the file that lacks."""
        return cls(
            (directory / CA_FILE).read_bytes(),
            (directory / CERTIFICATE_FILE).read_bytes(),
            (directory / KEY_FILE).read_bytes(),
        )
