"""A join port behind a real shared port and before a real etcd, and what strangers may send there."""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.cluster_records import InvitationRecord
from headway.daemon.net.certificates import CertificateAuthority
from headway.daemon.net.join_client import Joined, join
from headway.daemon.net.join_port import JoinLimits, JoinPort
from headway.daemon.net.join_token import SERVER_NAME, SIGNER_NAME, AskCertificate, JoinAnswer, JoinToken
from headway.daemon.net.port_process import PortProcess
from headway.daemon.net.signer import Signer
from headway.daemon.net.signing_request import new_key, signing_request
from headway.stages.sockets.shared_port import shared_address

CALL_S = 10.0


def invitation(name: str, *, role: str = "node", valid_s: float = 600.0) -> InvitationRecord:
    """What an operator asks for."""
    return InvitationRecord(
        name=name, role=role, hosts=(), etcd=("10.0.0.5:2379",), secret_sha256="", expires_at=0.0, valid_s=valid_s
    )


@dataclass
class JoinPlace:
    """A daemon's parts that new machines meet."""

    signer: Signer
    address: str
    members: set[str] = field(default_factory=set)
    """Names of living nodes."""
    ahead_s: float = 0.0
    """By how much the clock of the signer is ahead."""
    asked: list[AskCertificate] = field(default_factory=list)
    """What has come with a secret."""
    told: list[str] = field(default_factory=list)
    """What keeps everybody from joining."""

    async def invited(self, name: str, *, role: str = "node", lasts_s: float = 60.0) -> JoinToken:
        """Return a token."""
        secret = await self.signer.invite(invitation(name, role=role), lasts_s=lasts_s)
        return JoinToken(name, (self.address,), self.signer.ca_sha256, secret)

    async def join(self, token: JoinToken, request: str = "") -> Joined:
        """Join as a new machine does."""
        request = request or signing_request(token.name, new_key())
        return await asyncio.to_thread(join, token, request, patience_s=0.0)

    def dialled(self) -> ssl.SSLSocket:
        """A stranger's connection, after the handshake. Raises OSError."""
        host, port = self.address.partition("/")[0].split(":")
        plain = socket.create_connection((host, int(port)), timeout=CALL_S)
        try:
            plain.sendall(f"CONNECT {SERVER_NAME}:443 HTTP/1.1\r\n\r\n".encode())
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                piece = plain.recv(1)
                head += piece
                if not piece:
                    raise ConnectionError(f"closed after {head!r}")
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            return context.wrap_socket(plain, server_hostname=SIGNER_NAME)
        except OSError:
            plain.close()
            raise

    def sent(self, raw: bytes) -> dict[str, object]:
        """Send bytes as a stranger; return the answer, empty if the connection broke before it. Raises OSError."""
        with self.dialled() as connection:
            with suppress(OSError):  # the answer may come before everything is sent
                connection.sendall(raw)
            answer = b""
            with suppress(ConnectionError, ssl.SSLError):
                while piece := connection.recv(1 << 16):
                    answer += piece
        found: dict[str, object] = json.loads(answer or b"{}")
        return found


@asynccontextmanager
async def join_place(
    authority: CertificateAuthority, etcd: EtcdClient, folder: Path, *, limits: JoinLimits | None = None
) -> AsyncIterator[JoinPlace]:
    """The port of an authority, as long as the body lasts."""
    import time

    signer = Signer(
        authority,
        etcd,
        is_member=lambda name: name.casefold() in {member.casefold() for member in place.members},
        clock=lambda: time.time() + place.ahead_s,
    )
    place = JoinPlace(signer, "")

    async def sign(asked: AskCertificate) -> JoinAnswer:
        place.asked.append(asked)
        return await signer.join(asked)

    port = JoinPort(
        authority,
        sign,
        folder=folder,
        limits=limits,
        tell=place.told.append,
    )
    front = PortProcess("127.0.0.1", 0, daemon_port=9, folder=folder)
    place.address = shared_address(f"127.0.0.1:{front.port}", SERVER_NAME)
    tasks = [asyncio.create_task(port.run()), asyncio.create_task(front.run())]
    try:
        yield place
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        front.close()
        port.close()
