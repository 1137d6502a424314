"""What a new machine and the authority say to each other: one line of JSON each way, inside TLS. Pure."""

from typing import Final

import msgspec

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
