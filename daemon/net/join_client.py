"""The new machine's side: it finds the authority, makes sure that it is the one of the token, and then proves itself.

The first connection fetches the authority's certificate and proves nothing. If the digest is the token's, a second one
is made that TLS verifies with that certificate alone. The secret goes over the second one only.
"""

import hashlib
import json
import shlex
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from headway.daemon.base.addresses import split_address
from headway.daemon.base.errors import ConfigError
from headway.daemon.net.certificates import names_in, read_certificate, write_private
from headway.daemon.net.join_token import (
    MAX_ANSWER_BYTES,
    SIGNER_NAME,
    AskAuthority,
    AskCertificate,
    JoinAnswer,
    JoinToken,
    read_answer,
)
from headway.daemon.net.signing_request import NEXT_KEY, next_key, signing_request
from headway.stages.durable import make_durable
from headway.stages.errors import UnavailableError
from headway.stages.sockets.roles import Role, holder
from headway.stages.sockets.shared_port import listening_ports
from headway.stages.sockets.tls_identity import CA_FILE, CERTIFICATE_FILE, KEY_FILE

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


SETTINGS_FILE: Final = "daemon.toml"


class JoinedFolder:
    """A folder in which nothing of an earlier identity is. An attempt that was cut off may be repeated there."""

    def __init__(self, folder: Path, token: JoinToken) -> None:
        """Make it, with this machine's key. Raises ConfigError; the token is still good then."""
        self.folder = folder
        self._name = token.name
        if all((folder / name).exists() for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE)):
            start = f": start it with `{start_command(folder)}`" if (folder / SETTINGS_FILE).exists() else ""
            raise ConfigError(
                f"has joined already{_as_whom(folder)}{start}; or name another folder with --dir", str(folder)
            )
        files = [KEY_FILE] if (folder / NEXT_KEY).exists() else [CA_FILE, CERTIFICATE_FILE, KEY_FILE, SETTINGS_FILE]
        if there := [name for name in files if (folder / name).exists()]:
            raise ConfigError(f"has {there[0]} already; name another folder with --dir", str(folder))
        with self._told():
            # It lies there before anybody is asked: the authority gives a certificate to this key alone.
            self.request = signing_request(token.name, next_key(folder, b""))

    def keep(self, joined: Joined, settings: dict[str, object]) -> None:
        """Write the files, and last of all the key. settings: keys of a node's settings that the user gave.

        Raises ConfigError; then the same line does it again.
        """
        answer = joined.answer
        ssl.PEM_cert_to_DER_cert(answer.certificate)
        files = {CERTIFICATE_FILE: answer.certificate.encode(), CA_FILE: answer.authority.encode()}
        if answer.role == Role.NODE:
            files[SETTINGS_FILE] = node_settings(self._name, joined, settings).encode()
        with self._told():
            for name, content in files.items():
                write_private(self.folder / name, content)
                make_durable(self.folder / name)
            make_durable(self.folder)  # the key says that all the others are there
            (self.folder / NEXT_KEY).replace(self.folder / KEY_FILE)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Translate errors of files. Raises ConfigError."""
        try:
            yield
        except OSError as error:
            where = str(error.filename or self.folder)
            raise ConfigError(f"cannot be written: {error.strerror}; then run the same line again", where) from error


def _as_whom(folder: Path) -> str:
    """Return ` as NAME (ROLE)`, as the folder's certificate says; empty if it cannot be read."""
    try:
        return f" as {holder(names_in(read_certificate((folder / CERTIFICATE_FILE).read_bytes(), CERTIFICATE_FILE)))}"
    except (OSError, ConfigError):
        return ""


def identity_flags(folder: Path) -> str:
    """Return what names a joined node's settings and certificate on a command line."""
    return shlex.join(["--config", str(folder / SETTINGS_FILE), "--certs", str(folder)])


def start_command(folder: Path) -> str:
    """Return the line that starts the daemon of a joined node. Its state lies there too, not in the system's folder."""
    return f"headway daemon {identity_flags(folder)} --state-dir {shlex.quote(str(folder / 'state'))}"


def relay_command(folder: Path, joined: Joined) -> str:
    """Return the line that makes the machine of a joined node a relay instead."""
    return shlex.join(["headway", "relay", "--certs", str(folder), "--etcd", ",".join(joined.answer.etcd)])


def shell_settings(folder: Path, joined: Joined) -> str:
    """Return the line that names cluster and certificate to the shell of a person who has joined."""
    named = {"HEADWAY_ETCD": ",".join(joined.answer.etcd), "HEADWAY_CERTS": str(folder.absolute())}
    return "export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in named.items())


def node_settings(name: str, joined: Joined, settings: dict[str, object]) -> str:
    """Return the settings of a new node in TOML."""
    told: dict[str, object] = {
        "name": name,
        "etcd": list(joined.answer.etcd),
        "one_port": True,
        "listen": "0.0.0.0:7070",
        "advertise_host": joined.own_host,
    } | {key: value for key, value in settings.items() if value is not None}
    head = "# Written by `headway join`; `headway config show` names all keys.\n"
    # Texts, lists of texts and booleans are the same in JSON and in TOML.
    return head + "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in told.items())
