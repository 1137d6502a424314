"""Pages of a cluster for browsers: `headway web`. Every route only reads, and its session to etcd changes nothing."""

import asyncio
import hmac
import ipaddress
import secrets
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NoReturn
from urllib.parse import quote, urlsplit

from aiohttp import web
from cryptography.hazmat.primitives.hashes import SHA256

from headway.daemon.base.addresses import LOCAL_HOSTS, bracketed, join_address, split_address
from headway.daemon.base.errors import ConfigError
from headway.daemon.client.cluster_access import ClusterAddress, ClusterSession
from headway.daemon.client.job_requests import job_of
from headway.daemon.client.live_state import BEAT_S, ClusterFollower, JobFollower, Viewer
from headway.daemon.net.certificates import check_own_certificate, names_in, read_certificate
from headway.daemon.reports.report_page import PAGE
from headway.stages.sockets.tls_identity import CERTIFICATE_FILE, KEY_FILE

MOST_VIEWERS: Final = 100
MOST_CONNECTIONS: Final = 4 * MOST_VIEWERS
"""A browser opens several; more connections are closed unheard."""
SLOW_S: Final = 30.0
"""A viewer that takes nothing for so long is dropped. Its page dials again by itself."""
END_S: Final = 0.2
"""Ctrl-C waits so long for answers that are on their way."""
TYPES: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""What a page may load: nothing from another host."""
HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
NO_TOKEN: Final = "open the whole address that `headway web` printed: its token is what lets you in"
OTHER_HOST: Final = "this server has another name: open the address that `headway web` printed"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Where the pages are served, and how."""

    host: str
    port: int
    """0: a free one."""
    tls: ssl.SSLContext | None = None
    """None: plain, on loopback alone."""
    fingerprint: str = ""
    """SHA-256 of the certificate, to compare with what a browser shows."""
    names: tuple[str, ...] = ()
    """Names of this server that a Host header may bear, beside addresses and this machine's own."""

    @classmethod
    def read(cls, listen: str, certificate: Path | None, key: Path | None, own: Path | None) -> "Listening":
        """Read the options. own: folder of the person's certificate, which serves where no other one is named.

        Raises ConfigError: another address than loopback without TLS, or a file that cannot be used.
        """
        host, port = split_address(listen, "--listen")
        if (certificate is None) is not (key is None):
            raise ConfigError("--tls-cert and --tls-key go together", "--listen")
        if certificate is None and not is_loopback(host):
            if own is None:
                what = "others would read this: serve it with --tls-cert and --tls-key, or on 127.0.0.1 alone"
                raise ConfigError(what, f"--listen {listen}")
            certificate, key = own / CERTIFICATE_FILE, own / KEY_FILE
        if certificate is None or key is None:
            return cls(host=host, port=port)
        try:
            found = read_certificate(certificate.read_bytes(), str(certificate))
            check_own_certificate(found, str(certificate), serves=True)
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(certificate, key)
        except OSError as error:  # ssl's errors are such
            raise ConfigError(
                f"cannot be used: {error.strerror or error}", str(error.filename or certificate)
            ) from error
        digest = found.fingerprint(SHA256()).hex(":").upper()
        return cls(host=host, port=port, tls=tls, fingerprint=digest, names=names_in(found))

    def url(self, port: int, token: str) -> str:
        """Return the address that a person opens."""
        host = socket.gethostname() if self.host in ("0.0.0.0", "::", "") else bracketed(self.host)
        return f"http{'s' * (self.tls is not None)}://{host}:{port}/?token={token}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in LOCAL_HOSTS


def is_own_host(header: str, names: Collection[str]) -> bool:
    """Return whether a Host header names this server. A foreign name that resolves to it is another site's attack; an
    address is nobody's name.
    """
    try:
        host = (urlsplit(f"//{header}").hostname or "").rstrip(".")
    except ValueError:
        return False
    if host in {"localhost", socket.gethostname().casefold(), *(name.casefold() for name in names)}:
        return True
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False


class Pages:
    """The routes. Each only reads, and each wants the token that the address of this server has."""

    def __init__(self, follower: ClusterFollower, listening: Listening, token: str) -> None:
        self._follower, self._listening, self._token = follower, listening, token.encode()
        self._num_viewers = 0
        self._jobs: dict[str, tuple[JobFollower, asyncio.Task[None]]] = {}
        """Jobs that somebody looks at, each with the task that follows it."""
        self._files = {each.name: each.read_bytes() for each in PAGE.iterdir() if Path(each.name).suffix in TYPES}
        self.app = web.Application(middlewares=[self._guarded])
        self.app.router.add_get("/", partial(self._file, "cluster.html"))
        self.app.router.add_get("/events", self._cluster_events)
        self.app.router.add_get("/jobs/{name}", self._job)
        self.app.router.add_get("/jobs/{name}/events", self._job_events)
        for name in self._files:
            self.app.router.add_get(f"/page/{name}", partial(self._file, name))

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer who may ask, and tell browsers to trust nothing else."""
        try:
            answer = await self._answer(request, handler)
        except web.HTTPException as refusal:  # of the router: no such page, another method than GET
            answer = web.Response(status=refusal.status, text=f"{refusal.reason}\n")
        if not answer.prepared:
            answer.headers.update(HEADERS)
        return answer

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not is_own_host(request.host, self._listening.names):
            return web.Response(status=403, text=f"{OTHER_HOST}\n")
        cookie = f"headway-{request.transport.get_extra_info('sockname')[1]}" if request.transport else ""
        told = request.query.get("token", "")
        if not self._is_token(told or request.cookies.get(cookie, "")):
            return web.Response(status=403, text=f"{NO_TOKEN}\n")
        if not told:
            return await handler(request)
        # A redirect would come from whatever page has the link, and a strict cookie is not sent on behalf of another.
        path = quote(request.path)
        answer = web.Response(text=f'<link rel="icon" href="data:,"><meta http-equiv="refresh" content="0;url={path}">')
        answer.content_type = "text/html"
        is_secure = self._listening.tls is not None
        answer.set_cookie(cookie, told, httponly=True, samesite="Strict", secure=is_secure)
        return answer

    def _is_token(self, told: str) -> bool:
        return hmac.compare_digest(told.encode(errors="replace"), self._token)

    async def _file(self, name: str, _: web.Request) -> web.Response:
        return web.Response(body=self._files[name], content_type=TYPES[Path(name).suffix], charset="utf-8")

    async def _job(self, request: web.Request) -> web.Response:
        try:
            job_of(self._follower.view, request.match_info["name"])
        except ConfigError as error:
            return web.Response(status=404, text=f"{error}\n")
        return await self._file("job.html", request)

    async def _cluster_events(self, request: web.Request) -> web.StreamResponse:
        if self._num_viewers >= MOST_VIEWERS:
            return _full()
        with self._follower.viewer() as viewer:
            return await self._stream(request, viewer, lambda _: b"")

    async def _job_events(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name not in self._follower.view.jobs:
            raise web.HTTPNotFound
        if self._num_viewers >= MOST_VIEWERS:
            return _full()
        if name not in self._jobs:
            new = JobFollower(self._follower, name)
            self._jobs[name] = new, asyncio.create_task(new.run())
        follower, following = self._jobs[name]
        try:
            with follower.viewer() as viewer:
                return await self._stream(request, viewer, follower.unsent_rows)
        finally:
            if not follower.topic.viewers:
                following.cancel()
                self._jobs.pop(name, None)

    async def _stream(
        self, request: web.Request, viewer: Viewer, unsent_rows: Callable[[Viewer], bytes]
    ) -> web.StreamResponse:
        """Send what a viewer has not got, until it leaves or takes nothing any more."""
        answer = web.StreamResponse(headers=HEADERS | {"Content-Type": "text/event-stream"})
        self._num_viewers += 1
        try:
            await answer.prepare(request)
            while True:
                events = await viewer.next()
                async with asyncio.timeout(SLOW_S):
                    await answer.write(events + unsent_rows(viewer) or b":\n\n")
        except (ConnectionError, TimeoutError):
            if request.transport is not None:
                request.transport.abort()
            return answer
        finally:
            self._num_viewers -= 1


def _full() -> web.Response:
    return web.Response(status=503, text=f"{MOST_VIEWERS} pages look already\n")


async def serve(address: ClusterAddress, listening: Listening, *, on_ready: Callable[[str], None]) -> NoReturn:
    """Serve the pages until cancelled. on_ready: told the address to open, with its token.

    Raises StoreUnreachableError if etcd is not there at the start, ConfigError for a port that is taken.
    """
    token = secrets.token_urlsafe(32)
    async with ClusterSession(address) as session:
        session.client.ask_before_changes(_why_no_change)
        follower = ClusterFollower(session, await session.view())
        runner = web.AppRunner(
            Pages(follower, listening, token).app,
            access_log=None,
            handler_cancellation=True,  # who leaves is no viewer any more
            keepalive_timeout=2 * BEAT_S,
            shutdown_timeout=END_S,
        )
        await runner.setup()
        assert runner.server is not None
        try:
            with closing(await _listen(runner.server, listening)) as server:
                on_ready(listening.url(server.sockets[0].getsockname()[1], token))
                await follower.run()
        finally:
            await runner.cleanup()


async def _listen(server: web.Server, listening: Listening) -> asyncio.Server:
    def protocol() -> asyncio.Protocol:
        return server() if len(server.connections) < MOST_CONNECTIONS else _Closed()

    try:
        return await asyncio.get_running_loop().create_server(
            protocol, listening.host, listening.port, ssl=listening.tls
        )
    except OSError as error:
        where = f"--listen {join_address(listening.host, listening.port)}"
        raise ConfigError(f"{error.strerror or error}; port 0 takes a free one", where) from error


class _Closed(asyncio.Protocol):
    """A connection too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """End it."""
        transport.close()


async def _why_no_change() -> str:
    return "headway web only reads"
