"""The new machine's side: it finds the authority, makes sure that it is the one of the token, and then proves itself.

The first connection fetches the authority's certificate and proves nothing. If the digest is the token's, a second one
is made that TLS verifies with that certificate alone. The secret goes over the second one only.
"""

import hashlib
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Final

import msgspec

from headway.daemon.addresses import split_address
from headway.daemon.errors import ConfigError
from headway.daemon.joining.join_messages import (
    MAX_ANSWER_BYTES,
    SIGNER_NAME,
    AskAuthority,
    AskCertificate,
    JoinAnswer,
    read_answer,
)
from headway.daemon.joining.join_token import JoinToken
from headway.stages.errors import UnavailableError
from headway.stages.sockets.shared_port import listening_ports

CALL_S: Final = 10.0
"""Time for one connection, from dialling to the answer."""
PATIENCE_S: Final = 30.0
"""Time in which an authority that is busy is asked again."""
PAUSE_S: Final = 0.5
MAX_HEAD_BYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class Joined:
    """What a machine that may join has learnt."""

    answer: JoinAnswer
    own_host: str
    """This machine's address on the way to the authority."""


def join(token: JoinToken, request: str, *, patience_s: float = PATIENCE_S) -> Joined:
    """Ask for a certificate, at one address after the other.

    request: PEM of PKCS #10, for the token's name. Raises ConfigError: the token does not fit, or the authority
    refuses; UnavailableError: it does not answer.
    """
    until, reasons = time.monotonic() + patience_s, dict[str, str]()
    ca = b""
    while True:
        for port, server in _ways(token):
            try:
                ca = ca or _known_ca(port, server, token)  # once, so that a busy port needs to hear this machine once
                return _join_at(port, server, ca, token, request)
            except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
                reasons[port] = str(error)
        if time.monotonic() >= until:
            told = "; ".join(f"{port}: {reason}" for port, reason in reasons.items())
            raise UnavailableError("the authority", f"does not answer: {told}; then run the same line here again")
        time.sleep(PAUSE_S)


def _ways(token: JoinToken) -> Iterator[tuple[str, str]]:
    """Yield each port, and the server's name there."""
    for address in token.addresses:
        for port in listening_ports(address):
            yield port, address.partition("/")[2]


def _known_ca(port: str, server: str, token: JoinToken) -> bytes:
    """Return the authority's certificate in DER, if it is the token's."""
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
    told, _ = _exchange(port, server, stranger, AskAuthority())
    try:
        ca = ssl.PEM_cert_to_DER_cert(told.authority)
    except ValueError as error:
        raise ValueError("what answers is not an authority") from error
    if hashlib.sha256(ca).digest() != token.ca_sha256:
        raise ConfigError(f"the authority at {port} is not the token's: somebody else answers there", "token")
    return ca


def _join_at(port: str, server: str, ca: bytes, token: JoinToken, request: str) -> Joined:
    """Prove the invitation to a server that proves itself with the authority's certificate."""
    known = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    known.load_verify_locations(cadata=ca)
    proof = AskCertificate(name=token.name, secret=token.secret, request=request)
    answer, own_host = _exchange(port, server, known, proof)
    if answer.refusal:
        raise ConfigError(answer.refusal, "token")
    return Joined(answer, own_host)


def _exchange(
    port: str, server: str, context: ssl.SSLContext, request: AskAuthority | AskCertificate
) -> tuple[JoinAnswer, str]:
    """Send one request, and return the answer. Raises OSError and ValueError."""
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    until = time.monotonic() + CALL_S
    with closing(socket.create_connection(split_address(port, "token"), timeout=CALL_S)) as plain:
        own_host = str(plain.getsockname()[0])
        if server:
            plain.sendall(f"CONNECT {server}:443 HTTP/1.1\r\n\r\n".encode())
            _read_head(plain, until)
        with context.wrap_socket(plain, server_hostname=SIGNER_NAME) as connection:
            connection.sendall(msgspec.json.encode(request) + b"\n")
            raw = b""
            while not raw.endswith(b"\n"):
                connection.settimeout(max(until - time.monotonic(), 0.001))
                piece = connection.recv(MAX_ANSWER_BYTES)
                raw += piece
                if not piece or len(raw) > MAX_ANSWER_BYTES:
                    raise ValueError("the answer is cut off, or too long")
            with suppress(OSError):
                connection.unwrap()
    return read_answer(raw), own_host


def _read_head(connection: socket.socket, until: float) -> None:
    """Read the answer to CONNECT, and nothing of what follows. Raises ValueError unless it says yes, and OSError."""
    raw = b""
    while not raw.endswith(b"\r\n\r\n"):
        connection.settimeout(max(until - time.monotonic(), 0.001))  # each byte may come late, and all of them not
        piece = connection.recv(1)
        raw += piece
        if not piece or len(raw) > MAX_HEAD_BYTES:
            raise ValueError("what listens there is no daemon with one_port")
    if b" 200 " not in raw.partition(b"\r\n")[0]:
        raise ValueError("no authority is behind that port")
