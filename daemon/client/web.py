"""Pages of a cluster for browsers: `headway web`. Every route only reads, and its session to etcd changes nothing.

One task follows the cluster for all who look. What they get is the newest state, in parts: whoever reads slowly misses
states in between, and nothing waits in a queue.
"""

import asyncio
import hmac
import ipaddress
import secrets
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import AsyncExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from operator import is_not
from pathlib import Path
from typing import Final, NoReturn
from urllib.parse import quote, urlsplit

import msgspec
from aiohttp import web

from headway.daemon.base.addresses import LOCAL_HOSTS, bracketed, join_address, split_address
from headway.daemon.base.errors import ConfigError, StoreError
from headway.daemon.client.cluster_access import ClusterAddress, ClusterSession
from headway.daemon.client.doctor_outcome import LEADERLESS, OF_ETCD, advice_on, outcome_of, plain
from headway.daemon.client.node_requests import report_shares
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.net.certificates import check_own_certificate, names_in, read_certificate
from headway.daemon.reports.cluster_picture import MOST_TROUBLES, Trouble, job_row, link_rows, node_rows, troubles
from headway.daemon.reports.job_report import reports_in
from headway.stages.sockets.tls_identity import CERTIFICATE_FILE, KEY_FILE

MOST_VIEWERS: Final = 100
MOST_CONNECTIONS: Final = 4 * MOST_VIEWERS
"""A browser opens several; more connections are closed unheard."""
SLOW_S: Final = 30.0
"""A viewer that takes nothing for so long is dropped. Its page dials again by itself."""
BEAT_S: Final = 15.0
"""Something is sent at least so often, so that both sides notice a connection that is dead."""
END_S: Final = 0.2
"""Ctrl-C waits so long for answers that are on their way."""
PAUSE_S: Final = 0.5
"""Least time between two states that viewers get."""
LEAST_REST: Final = 150.0
"""A state that took a second to make is the last one for so many seconds: so pages take less than 1 % of a core."""
MEMBERS_EVERY_S: Final = 10.0
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
        return cls(host=host, port=port, tls=tls, names=names_in(found))

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


class Viewer:
    """One page that looks: what it has not got yet. The newest of each part replaces the one before."""

    def __init__(self, parts: Mapping[str, bytes]) -> None:
        self._unsent = dict(parts)
        self._has_news = asyncio.Event()

    def tell(self, part: str, event: bytes) -> None:
        """Note the newest event of a part."""
        self._unsent[part] = event
        self._has_news.set()

    async def next(self) -> bytes:
        """Return what it has not got, or a beat."""
        with suppress(TimeoutError):
            async with asyncio.timeout(BEAT_S):
                while not self._unsent:
                    self._has_news.clear()
                    await self._has_news.wait()
        events, self._unsent = b"".join(self._unsent.values()), {}
        return events or b":\n\n"


class Topic:
    """The newest state of one subject as events, one for each of its parts, and those who look at it."""

    def __init__(self) -> None:
        self._parts: dict[str, bytes] = {}
        self.viewers: set[Viewer] = set()

    def tell(self, part: str, value: object) -> None:
        """Tell everybody a part, if it has changed."""
        event = b"event: %b\ndata: %b\n\n" % (part.encode(), msgspec.json.encode(value))
        if self._parts.get(part) != event:
            self._parts[part] = event
            for viewer in self.viewers:
                viewer.tell(part, event)

    @contextmanager
    def viewer(self) -> Iterator[Viewer]:
        """Add someone who looks, until this context ends."""
        viewer = Viewer(self._parts)
        self.viewers.add(viewer)
        try:
            yield viewer
        finally:
            self.viewers.discard(viewer)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRow:
    """A member of etcd, as it tells of itself."""

    address: str
    version: str = ""
    database_bytes: int = 0
    is_leader: bool = False
    trouble: str = ""


class ClusterFollower:
    """Follows one cluster, and makes the state that its viewers get."""

    def __init__(self, session: ClusterSession) -> None:
        self.topic = Topic()
        self._session = session
        self._view = ClusterView()
        self._away: StoreError | None = None
        """Why etcd does not answer; None: it does."""
        self._members: tuple[MemberRow, ...] = ()
        self._remarks: tuple[Trouble, ...] = ()
        """That etcd is full, that this person's certificate ends."""
        self._inputs: tuple[object, ...] = ()
        """Records from which the newest nodes and links were made; replaced, never changed."""
        self._has_changed = asyncio.Event()

    async def run(self) -> NoReturn:
        """Follow until cancelled. An etcd that goes away, or refuses, is told of and followed again."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow())
            tasks.create_task(self._ask_members())
            tasks.create_task(self._tell())
        raise AssertionError("a cluster is followed for ever")

    @contextmanager
    def viewer(self) -> Iterator[Viewer]:
        """Add someone who looks; the first one gets a state that is not older."""
        if not self.topic.viewers:
            self._publish()
        with self.topic.viewer() as viewer:
            yield viewer

    async def _follow(self) -> NoReturn:
        while True:
            try:
                async for view in self._session.follow(on_away=self._note_away):
                    self._view, self._away = view, None
                    self._has_changed.set()
            except StoreError as error:
                self._note_away(error)
                await asyncio.sleep(PAUSE_S)

    def _note_away(self, error: StoreError) -> None:
        self._away = error
        self._has_changed.set()

    async def _ask_members(self) -> NoReturn:
        """Ask each member of etcd how it is, from time to time."""
        address = self._session.address
        async with AsyncExitStack() as stack:
            sessions = [
                await stack.enter_async_context(ClusterSession(replace(address, etcd=(member,))))
                for member in address.etcd
            ]
            while True:
                self._members = tuple(await asyncio.gather(*map(_ask, sessions)))
                remarks = {"your certificate": "", "etcd": ""}
                with suppress(ConfigError, StoreError):  # a renewal goes on; it is away, which is told
                    remarks["your certificate"] = address.certificate_end()
                    remarks["etcd"] = await self._session.why_full()
                self._remarks = tuple(Trouble(about=what, sentence=line) for what, line in remarks.items() if line)
                self._has_changed.set()
                await asyncio.sleep(MEMBERS_EVERY_S)

    async def _tell(self) -> NoReturn:
        """Make a state after each change, with rests that grow with the time that one takes."""
        while True:
            await self._has_changed.wait()
            self._has_changed.clear()
            began = time.perf_counter()
            if self.topic.viewers:
                self._publish()
            await asyncio.sleep(max(PAUSE_S, LEAST_REST * (time.perf_counter() - began)))

    def _publish(self) -> None:
        """Make the present state. Nodes and links follow from fewer records than jobs, which change all the time."""
        view, tell = self._view, self.topic.tell
        jobs = view.jobs_in_order()
        reports = reports_in(view, jobs)
        found = [*self._own_troubles(), *troubles(view, reports)]
        about = {"etcd": self._session.client.target, "leader": view.leader.node if view.leader else ""}
        tell("about", about | {"num_troubles": len(found), "troubles": found[:MOST_TROUBLES]})
        tell("jobs", [job_row(report) for report in reports])
        tell("users", report_shares(view))
        tell("members", self._members)
        inputs = (view.nodes, view.failures, view.probes, view.reach, view.leader, *(job.plan for job in jobs))
        if len(inputs) != len(self._inputs) or any(map(is_not, inputs, self._inputs)):
            self._inputs = inputs
            tell("nodes", node_rows(view))
            tell("links", link_rows(view))

    def _own_troubles(self) -> Iterator[Trouble]:
        """Yield what is wrong with etcd, and with this person's certificate."""
        away = [(self._away.target, self._away.reason)] if self._away is not None else []
        for about, reason in away or [(f"etcd at {each.address}", each.trouble) for each in self._members]:
            if reason:
                yield Trouble(about=about, sentence=plain(reason), advice=advice_on([outcome_of(reason)], OF_ETCD))
        yield from self._remarks


async def _ask(session: ClusterSession) -> MemberRow:
    (address,) = session.address.etcd
    try:
        told = await session.client.status()
    except StoreError as error:
        return MemberRow(address=address, trouble=plain(error.reason))
    return MemberRow(
        address=address,
        version=told.version,
        database_bytes=told.database_bytes,
        is_leader=told.is_leader,
        trouble="" if told.has_leader else LEADERLESS,
    )


class Pages:
    """The routes. Each only reads, and each wants the token that the address of this server has."""

    def __init__(self, follower: ClusterFollower, listening: Listening, token: str) -> None:
        self._follower, self._listening, self._token = follower, listening, token.encode()
        self._num_viewers = 0
        folder = resources.files("headway.daemon.reports") / "page"
        self._files = {each.name: each.read_bytes() for each in folder.iterdir() if Path(each.name).suffix in TYPES}
        self.app = web.Application(middlewares=[self._guarded])
        self.app.router.add_get("/", partial(self._file, "cluster.html"))
        self.app.router.add_get("/events", self._events)
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

    async def _events(self, request: web.Request) -> web.StreamResponse:
        with self._follower.viewer() as viewer:
            return await self._stream(request, viewer)

    async def _stream(self, request: web.Request, viewer: Viewer) -> web.StreamResponse:
        """Send what a viewer has not got, until it leaves or takes nothing any more."""
        if self._num_viewers >= MOST_VIEWERS:
            return web.Response(status=503, text=f"{MOST_VIEWERS} pages look already\n")
        answer = web.StreamResponse(headers=HEADERS | {"Content-Type": "text/event-stream"})
        self._num_viewers += 1
        try:
            await answer.prepare(request)
            while True:
                events = await viewer.next()
                async with asyncio.timeout(SLOW_S):
                    await answer.write(events)
        except (ConnectionError, TimeoutError):
            if request.transport is not None:
                request.transport.abort()
            return answer
        finally:
            self._num_viewers -= 1


async def serve(address: ClusterAddress, listening: Listening, *, on_ready: Callable[[str], None]) -> NoReturn:
    """Serve the pages until cancelled. on_ready: told the address to open, with its token.

    Raises StoreUnreachableError if etcd is not there at the start, ConfigError for a port that is taken.
    """
    token = secrets.token_urlsafe(32)
    async with ClusterSession(address) as session:
        session.client.ask_before_changes(_why_no_change)
        await session.view()
        follower = ClusterFollower(session)
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
