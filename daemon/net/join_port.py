"""The one port that answers strangers: TLS of the authority, one request, one answer, and the end.

It listens at a unix socket behind the node's one port, under the name of join_messages.py, and demands no certificate.
So everything is limited: connections, their number a second, their time, and the bytes of a request. It is no part of
the gRPC server, which strangers do not pass.
"""

import asyncio
import os
import socket
import ssl
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

import msgspec
import structlog

from headway.daemon.base.errors import ConfigError, StoreError
from headway.daemon.net.certificates import CertificateAuthority, certificate_pem, key_pem
from headway.daemon.net.invitation import RefusedError
from headway.daemon.net.join_token import (
    MAX_REQUEST_BYTES,
    SERVER_NAME,
    SIGNER_NAME,
    SIGNER_ROLE,
    AskAuthority,
    AskCertificate,
    JoinAnswer,
    read_request,
)
from headway.daemon.net.signing_request import new_key
from headway.stages.sockets.local_socket import TLS_SUFFIX, socket_path

log = structlog.get_logger()


OWN_VALIDITY: Final = timedelta(hours=1)
"""Of the port's certificate, which each connection gets anew: so it fits whatever time the clock is set to."""
CLOSE_S: Final = 1.0
REST_S: Final = 0.2
"""Pause after the process had no file left for a connection."""

Sign = Callable[[AskCertificate], Awaitable[JoinAnswer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinLimits:
    """What strangers may take."""

    most_open: int = 32
    """Maximum number of connections; beyond, the oldest is closed."""
    per_s: float = 10.0
    burst: int = 20
    """Maximum number that is heard in the time for so many at that rate; others are closed unheard."""
    deadline_s: float = 10.0
    """Of a connection, from its first packet to its end."""
    handshake_s: float = 5.0


class JoinPort:
    """Made once; `run` serves until cancelled."""

    def __init__(
        self,
        authority: CertificateAuthority,
        sign: Sign,
        *,
        folder: Path,
        limits: JoinLimits | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """folder: of the node's sockets. tell: says what keeps everybody from joining; empty: nothing does.

        Raises ConfigError when no socket is possible there.
        """
        self._authority = authority
        self._sign = sign
        self._limits = limits or JoinLimits()
        self._heard: deque[float] = deque(maxlen=self._limits.burst)
        """When the last connections were heard."""
        self._tell = tell
        self._open: dict[asyncio.Task[None], None] = {}
        """The oldest first."""
        self._listener = _listen(folder)

    async def run(self) -> None:
        """Serve until cancelled."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    connection, _ = await loop.sock_accept(self._listener)
                except OSError:
                    await asyncio.sleep(REST_S)
                    continue
                self._welcome(connection)
        finally:
            for task in self._open:
                task.cancel()
            await asyncio.gather(*self._open, return_exceptions=True)

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()

    def _welcome(self, connection: socket.socket) -> None:
        now, most = time.monotonic(), self._limits.burst
        if len(self._heard) == most and now < self._heard[0] + most / self._limits.per_s:
            connection.close()
            return
        self._heard.append(now)
        if len(self._open) >= self._limits.most_open:
            oldest = next(iter(self._open))
            oldest.cancel()
            del self._open[oldest]
        task = asyncio.create_task(self._serve(connection), name="a stranger")
        self._open[task] = None
        task.add_done_callback(lambda done: self._open.pop(done, None))

    async def _serve(self, connection: socket.socket) -> None:
        """Answer one request. Nothing that a stranger sends is an error of this daemon."""
        transport: asyncio.WriteTransport | None = None
        try:
            context = self._context()
            async with asyncio.timeout(self._limits.deadline_s):
                reader = asyncio.StreamReader(limit=MAX_REQUEST_BYTES)
                protocol = asyncio.StreamReaderProtocol(reader)
                loop = asyncio.get_running_loop()
                transport, _ = await loop.connect_accepted_socket(
                    lambda: protocol,
                    connection,
                    ssl=context,
                    ssl_handshake_timeout=self._limits.handshake_s,
                    ssl_shutdown_timeout=CLOSE_S,
                )
                writer = asyncio.StreamWriter(transport, protocol, reader, loop)
                writer.write(msgspec.json.encode(await self._answer(reader)) + b"\n")
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError, EOFError):  # ssl.SSLError is an OSError
            pass
        finally:
            if transport is not None:
                transport.abort()
            else:
                connection.close()

    async def _answer(self, reader: asyncio.StreamReader) -> JoinAnswer:
        try:
            request = read_request(await reader.readuntil(b"\n"))
            if isinstance(request, AskAuthority):
                return JoinAnswer(authority=certificate_pem(self._authority.certificate).decode())
            return await self._sign(request)
        except asyncio.LimitOverrunError:
            return JoinAnswer(refusal=f"a request has at most {MAX_REQUEST_BYTES} bytes")
        except ValueError as error:
            return JoinAnswer(refusal=str(error))
        except RefusedError as error:
            log.warning("join_refused", reason=error.reason)
            return JoinAnswer(refusal=error.reason)
        except StoreError as error:
            log.warning("join_failed", reason=str(error))
            return JoinAnswer(refusal="the authority cannot reach etcd now: try again")

    def _context(self) -> ssl.SSLContext:
        """Return what this port shows to one stranger. Raises OSError."""
        key = new_key()
        certificate = self._authority.certify(key.public_key(), SIGNER_NAME, role=SIGNER_ROLE, validity=OWN_VALIDITY)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            # ssl reads files alone; only this user may open it
            with tempfile.NamedTemporaryFile() as file:
                file.write(certificate_pem(certificate) + key_pem(key))
                file.flush()
                context.load_cert_chain(file.name)
        except OSError as error:
            self._tell(f"nobody can join: its port gets no certificate: {error.strerror or error}")
            raise
        self._tell("")
        return context


def _listen(folder: Path) -> socket.socket:
    path = socket_path(folder, SERVER_NAME, TLS_SUFFIX)
    if path is None:
        raise ConfigError("is too long a path for a socket", str(folder))
    listener = socket.socket(socket.AF_UNIX)
    try:
        with suppress(FileNotFoundError):
            path.unlink()
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(str(path))
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise ConfigError(f"no socket is possible there: {error.strerror}", str(path)) from error
    listener.setblocking(False)
    return listener
