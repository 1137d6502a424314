"""A join token: one word that lets a new machine find the authority, know it, and prove that it was invited."""

import base64
import binascii
import zlib
from dataclasses import dataclass, field
from typing import Final

import msgspec

from headway.daemon.base.addresses import is_node_name, split_address
from headway.daemon.base.errors import ConfigError
from headway.stages.sockets.shared_port import listening_ports

PREFIX: Final = "hw1-"
SECRET_BYTES: Final = 24
DIGEST_BYTES: Final = 32
MAX_TOKEN_CHARACTERS: Final = 4096
_CHECK_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class JoinToken:
    """The content of a token."""

    name: str
    """Name of the certificate that it is for."""
    addresses: tuple[str, ...]
    """Addresses where the authority is asked, as in stages/sockets/shared_port.py."""
    ca_sha256: bytes
    """Digest of the authority's certificate in DER."""
    secret: bytes = field(repr=False)
    """Proves once that its holder was invited."""


def write_token(token: JoinToken) -> str:
    """Return the token as one word, with a check sum against a lost or changed letter."""
    raw = msgspec.msgpack.encode((token.name, token.addresses, token.ca_sha256, token.secret))
    check = zlib.crc32(raw).to_bytes(_CHECK_BYTES, "big")
    return PREFIX + base64.urlsafe_b64encode(check + raw).decode().rstrip("=")


def read_token(text: str) -> JoinToken:
    """Return the content of a word. Raises ConfigError, which does not repeat the word: it may hold a secret."""
    text = text.strip()
    if not text.startswith(PREFIX) or len(text) > MAX_TOKEN_CHARACTERS:
        raise ConfigError(f"is not a join token, which begins with {PREFIX}: `headway invite` prints one", "token")
    word = text.removeprefix(PREFIX)
    try:
        held = base64.b64decode(word + "=" * (-len(word) % 4), altchars=b"-_", validate=True)
        check, raw = held[:_CHECK_BYTES], held[_CHECK_BYTES:]
        if zlib.crc32(raw).to_bytes(_CHECK_BYTES, "big") != check:
            raise ValueError("check sum")
        name, addresses, ca_sha256, secret = msgspec.msgpack.decode(raw, type=tuple[str, tuple[str, ...], bytes, bytes])
        if len(ca_sha256) != DIGEST_BYTES or len(secret) != SECRET_BYTES or not is_node_name(name) or not addresses:
            raise ValueError("content")
        for port in (port for address in addresses for port in listening_ports(address)):
            split_address(port, "token")
    except (binascii.Error, ValueError, msgspec.MsgspecError, RecursionError, ConfigError) as error:
        raise ConfigError("a part of it is missing or changed: copy the whole line again", "token") from error
    return JoinToken(name, addresses, ca_sha256, secret)


MAX_REQUEST_BYTES: Final = 16 << 10
MAX_ANSWER_BYTES: Final = 64 << 10
SERVER_NAME: Final = "join"
"""What the port is called behind a node's one port."""
SIGNER_NAME: Final = "authority.headway"
"""The name in the certificate of the port. The authority makes it for itself alone."""
SIGNER_ROLE: Final = "signer"
"""Not a role of this release: as a client its holder may do nothing."""


class AskAuthority(msgspec.Struct, tag_field="ask", tag="authority", forbid_unknown_fields=True):
    """Send the authority's certificate."""


class AskCertificate(msgspec.Struct, tag_field="ask", tag="certificate", forbid_unknown_fields=True):
    """Sign a request, for somebody who was invited."""

    name: str
    secret: bytes
    request: str
    """PEM of PKCS #10."""


class JoinAnswer(msgspec.Struct, omit_defaults=True):
    """The answer to either."""

    refusal: str = ""
    """Why there is none, in one line; empty: there is."""
    authority: str = ""
    certificate: str = ""
    role: str = ""
    etcd: tuple[str, ...] = ()


JoinRequest = AskAuthority | AskCertificate


def read_request(raw: bytes) -> JoinRequest:
    """Return a request. Raises ValueError for anything else."""
    if len(raw) > MAX_REQUEST_BYTES:
        raise ValueError(f"a request has at most {MAX_REQUEST_BYTES} bytes")
    try:
        found: JoinRequest = msgspec.json.decode(raw, type=JoinRequest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError("is not a request") from error
    return found


def read_answer(raw: bytes) -> JoinAnswer:
    """Return an answer. Raises ValueError for anything else."""
    try:
        return msgspec.json.decode(raw, type=JoinAnswer)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError("is not an answer") from error
