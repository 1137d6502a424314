"""Finds the cluster of a command, and opens a session with it: etcd's present content, and every later change.

The order is: `--etcd` or HEADWAY_ETCD, with `--certs` or HEADWAY_CERTS; otherwise the local cluster of the folder
`--cluster` or HEADWAY_CLUSTER or `.headway`, where `headway up` writes `cluster.json`.
"""

import asyncio
import hashlib
import os
import secrets
import shlex
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, Self, TypeVar

import msgspec

from headway.daemon.base.addresses import NodeEndpoint, is_node_name
from headway.daemon.base.errors import (
    CompactedError,
    ConfigError,
    ConflictError,
    RecoveryError,
    StoreError,
    StoreUnreachableError,
)
from headway.daemon.cluster.keys import PREFIX, Keys
from headway.daemon.cluster.members import read_members
from headway.daemon.cluster.records import NodeRecord
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.jobs.resolve import default_cache_dir
from headway.stages.errors import PeerError, UnavailableError
from headway.stages.sockets.tls_identity import CA_FILE, CERTIFICATE_FILE, KEY_FILE, TlsIdentity

MAX_KNOWN: Final = 64
"""Maximum number of addresses kept of a large cluster; one that answers is enough."""


def remember(etcd: Sequence[str], nodes: Iterable[NodeRecord]) -> None:
    """Keep the addresses of a cluster's nodes. If the folder cannot be written, only this memory is lost."""
    endpoints = [NodeEndpoint(node.name, node.address) for node in nodes][:MAX_KNOWN]
    path, content = _path(etcd), msgspec.json.encode(endpoints)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with suppress(OSError):
        if not endpoints or (path.is_file() and path.read_bytes() == content):
            return
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft.write_bytes(content)
        draft.replace(path)


def known(etcd: Sequence[str]) -> tuple[NodeEndpoint, ...]:
    """Return the daemons of a cluster when they were last seen; empty: none was seen."""
    try:
        found = msgspec.json.decode(_path(etcd).read_bytes(), type=list[NodeEndpoint])
    except (OSError, msgspec.DecodeError, RecursionError):
        return ()
    return tuple(endpoint for endpoint in found[:MAX_KNOWN] if is_node_name(endpoint.name))


def _path(etcd: Sequence[str]) -> Path:
    digest = hashlib.sha256("\n".join(sorted(etcd)).encode()).hexdigest()[:16]
    return default_cache_dir() / "clusters" / f"{digest}.json"


if TYPE_CHECKING:
    from headway.daemon.blobs.peer_client import NodeClient
    from headway.daemon.cluster.client import KeyValue
    from headway.daemon.cluster.transaction import Change, Compare
    from headway.daemon.cluster.watch import KeyEvent

DEFAULT_CLUSTER_DIR = Path(".headway")
CLUSTER_FILE = "cluster.json"
RESUME_PAUSE_S = 0.1
MAX_ATTEMPTS = 5
NO_DAEMON: Final = "no daemon is in the cluster yet; if one was started, its log says why"

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAddress:
    """Addresses and credentials of a cluster."""

    etcd: tuple[str, ...]
    """The members of etcd, each as host:port."""
    certificates: Path | None = None
    """Folder with ca.pem, cert.pem and key.pem; None: no TLS."""
    user: str = ""
    password: str = ""
    state_dir: Path | None = None
    """The folder of a local cluster."""
    daemons: tuple[str, ...] = ()
    """Daemons to ask while etcd is unreachable, each as host:port."""

    def identity(self) -> TlsIdentity | None:
        """Return this client's certificate. Raises ConfigError, naming the file that is missing or unusable."""
        if self.certificates is None:
            return None
        from headway.daemon.net.certificates import check_own_certificate, check_own_key, read_certificate
        from headway.daemon.net.signing_request import NEXT_KEY

        try:
            identity = TlsIdentity.read(self.certificates)
        except OSError as error:
            raise ConfigError(
                f"cannot be read: {error.strerror}; --certs names a folder with ca.pem, cert.pem and key.pem",
                str(error.filename),
            ) from error
        where = str(self.certificates / CERTIFICATE_FILE)
        certificate = read_certificate(identity.certificate, where)
        check_own_certificate(certificate, where, serves=False)
        try:
            check_own_key(certificate, identity.key, self.certificates)
        except ConfigError as error:
            if (self.certificates / NEXT_KEY).exists():
                raise ConfigError("a renewal was cut off: `headway certs renew` ends it", error.where) from error
            raise
        return identity

    def certificate_end(self) -> str:
        """Return a line if this person's certificate ends soon; of a local cluster, `headway up` makes another one.

        Raises ConfigError, as `identity`.
        """
        if self.state_dir is not None or (identity := self.identity()) is None or self.certificates is None:
            return ""
        from headway.daemon.net.certificates import end_of, read_certificate

        where = str(self.certificates / CERTIFICATE_FILE)
        return end_of(read_certificate(identity.certificate, where), where, now=datetime.now(UTC))


Pid = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
"""Number of one process: zero and negative numbers mean groups of processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFile:
    """`cluster.json`: the addresses of this folder's local cluster, while it runs."""

    pid: Pid
    etcd: tuple[str, ...]
    certificates: str
    daemons: tuple[str, ...] = ()
    """Daemons that were up when the file was written, each as host:port."""
    pids: dict[str, Pid] = field(default_factory=dict)
    """Process number of each node's daemon."""


def names_of(identity: TlsIdentity | None) -> tuple[str, ...]:
    """Return the names that tell a person's certificate from others, without roles; empty: there is none."""
    from headway.daemon.net.certificates import names_in, own_names, read_certificate

    return () if identity is None else own_names(names_in(read_certificate(identity.certificate, CERTIFICATE_FILE)))


def find_cluster(
    *,
    etcd: str | None = None,
    certs: Path | None = None,
    cluster: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> ClusterAddress:
    """Return the address given by flags, environment (os.environ if None) or folder; an explicit flag goes first.

    Raises StoreUnreachableError when no cluster runs. Raises ConfigError for an invalid address or an unreadable
    `cluster.json`.
    """
    environment = os.environ if environment is None else environment
    where = "--etcd"
    if not etcd and cluster is None:
        etcd, where = environment.get("HEADWAY_ETCD"), "HEADWAY_ETCD"
    if etcd:
        certs = certs or (Path(told) if (told := environment.get("HEADWAY_CERTS")) else None)
        return ClusterAddress(
            etcd=read_members([etcd], where, has_certificates=certs is not None),
            certificates=certs.expanduser() if certs else None,
            user=environment.get("HEADWAY_ETCD_USER", ""),
            password=_password(environment),
        )
    folder = cluster or Path(environment.get("HEADWAY_CLUSTER") or DEFAULT_CLUSTER_DIR)
    found = read_cluster_file(folder)
    if found is None or not Path(f"/proc/{found.pid}").exists():
        if _is_starting(folder):
            raise StoreUnreachableError(str(folder), "a cluster is starting here; ask again in a few seconds")
        raise StoreUnreachableError(
            str(folder), "no cluster runs here; start one with `headway up`, or name one with --etcd HOST:PORT"
        )
    return ClusterAddress(
        etcd=found.etcd, certificates=Path(found.certificates), state_dir=folder, daemons=found.daemons
    )


def _is_starting(folder: Path) -> bool:
    """Return whether a process has locked a state folder. Locking it here to find out could stop an `up`."""
    try:
        lock = (folder / "lock").stat()  # an inode's number alone repeats across file systems
        place = f" {os.major(lock.st_dev):02x}:{os.minor(lock.st_dev):02x}:{lock.st_ino} "
        return any("FLOCK" in line and place in line for line in Path("/proc/locks").read_text().splitlines())
    except OSError:
        return False


def read_cluster_file(folder: Path) -> ClusterFile | None:
    """Return what `headway up` has written into a state folder; None: nothing. Raises ConfigError."""
    path = folder / CLUSTER_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=ClusterFile)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot be read: {error}", str(path)) from error


def _password(environment: Mapping[str, str]) -> str:
    if not (told := environment.get("HEADWAY_ETCD_PASSWORD_FILE")):
        return ""
    try:
        return Path(told).expanduser().read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", f"HEADWAY_ETCD_PASSWORD_FILE = {told}") from error


class ClusterSession:
    """One conversation with a cluster, inside one event loop. A context manager."""

    def __init__(self, address: ClusterAddress, *, timeout_s: float = 5.0) -> None:
        from headway.daemon.cluster.client import EtcdClient
        from headway.daemon.cluster.connection import EtcdAccess
        from headway.daemon.net.certificates import why_no_operator

        self.address = address
        self.identity = address.identity()
        access = EtcdAccess(
            endpoints=address.etcd,
            identity=self.identity,
            user=address.user,
            password=address.password,
            timeout_s=timeout_s,
        )
        self.client = EtcdClient(access)
        self._why_no_operator = why_no_operator(self.identity, address.certificates)
        self.client.ask_before_changes(self._why_no_change)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.client.close()

    async def view(self) -> ClusterView:
        """Return etcd's present content. Raises StoreUnreachableError."""
        view, _ = await self._listed()
        if self.address.state_dir is None:
            remember(self.address.etcd, view.nodes.values())
        return view

    async def follow(
        self, *, on_away: Callable[[StoreError], None] = lambda _: None
    ) -> AsyncGenerator[ClusterView, None]:
        """Yield the view now, and again after every change. Never ends by itself.

        While etcd is away nothing is yielded; afterwards the view has every change. on_away: told why, while that
        lasts; the next view says that etcd is back.
        """
        is_first = True
        while True:
            try:
                view, revision = await self._listed()
            except StoreUnreachableError as error:
                if is_first:
                    raise
                on_away(error)
                continue  # this call has waited for an answer until its deadline
            is_first = False
            yield view
            try:
                async for batch in self.client.watch(PREFIX, from_revision=revision + 1):
                    yield _applied(view, batch.events)
            except (CompactedError, StoreUnreachableError) as error:
                on_away(error)
                await asyncio.sleep(RESUME_PAUSE_S)  # list everything again

    async def while_reachable(
        self, work: Coroutine[Any, Any, ResultT], *, patience_s: float = 20.0, probe_every_s: float = 5.0
    ) -> ResultT:
        """Return the result of work that may wait for etcd without end. Raises StoreUnreachableError after a long
        silence.
        """

        async def probe() -> NoReturn:
            heard_at = time.monotonic()
            while True:
                await asyncio.sleep(probe_every_s)
                try:
                    await self.client.status()
                    heard_at = time.monotonic()
                except StoreUnreachableError:
                    if time.monotonic() - heard_at >= patience_s:
                        raise

        return await unless(work, probe())

    async def why_full(self) -> str:
        """Return that etcd is full, with the commands that make room; empty: it is not. Raises StoreUnreachableError.

        Jobs train on without it, and so nothing else tells of it.
        """
        status = await self.client.status()
        if not status.is_full:
            return ""
        folder, name = self.address.certificates, f"etcd at {', '.join(self.address.etcd)}"
        files = () if folder is None else (("cacert", CA_FILE), ("cert", CERTIFICATE_FILE), ("key", KEY_FILE))
        urls = ",".join(f"http{'s' * bool(files)}://{member}" for member in self.address.etcd)
        flags = [f"--endpoints={urls}", *(f"--{flag}={folder}/{file}" for flag, file in files)]
        asked = f'e() {{ {shlex.join(["etcdctl", *flags])} "$@"; }}'
        what = f"{name} is full ({status.database_bytes / 1e6:,.0f} MB, its quota) and takes no change: jobs train on"
        room = f"`{asked}; e compact {status.revision}; e defrag; e alarm disarm` makes room"
        return f"{what}, but nothing is decided; {room}; auto-compaction or a larger quota keeps it"

    async def _listed(self) -> tuple[ClusterView, int]:
        listed = await self.client.get_prefix(PREFIX)
        return _applied(ClusterView(), listed.entries), listed.revision

    async def _why_no_change(self) -> str:
        """Return why this person changes nothing: a role, or a name that is revoked, whose certificate etcd takes until
        its user is gone.
        """
        if self.identity is None or self._why_no_operator:
            return self._why_no_operator
        for name in names_of(self.identity):
            if await self.client.get(Keys.revoked(name)) is not None:
                where = f"{self.address.certificates or ''}/{CERTIFICATE_FILE}"
                restored = f"another operator may `headway certs restore {name}`"
                return f"{where}: {name} is revoked, and changes nothing: {restored}"
        return ""


def _applied(view: ClusterView, entries: "Iterable[KeyValue | KeyEvent]") -> ClusterView:
    now = time.monotonic()
    for each in entries:
        view.apply(each.key, each.value, mod_revision=each.mod_revision, create_revision=each.create_revision, now=now)
    return view


async def unless(work: Awaitable[ResultT], guard: Awaitable[NoReturn]) -> ResultT:
    """Return the result of work, or raise what its guard raises before; neither goes on afterwards."""
    working, guarding = asyncio.ensure_future(work), asyncio.ensure_future(guard)
    try:
        await asyncio.wait({working, guarding}, return_when=asyncio.FIRST_COMPLETED)
        return await (working if working.done() else guarding)
    finally:
        for task in (working, guarding):
            task.cancel()
        await asyncio.wait({working, guarding})


@asynccontextmanager
async def node_client(identity: TlsIdentity | None) -> "AsyncIterator[NodeClient]":
    """Open a client of daemons, and close it. Raises ConfigError without a certificate."""
    from headway.daemon.blobs import peer_client

    if identity is None:
        raise ConfigError("daemons answer only clients with a certificate; name its folder", "--certs")
    client = peer_client.NodeClient(identity)
    try:
        yield client
    finally:
        await client.close()


async def first_answer(daemons: Iterable[NodeEndpoint], ask: Callable[[NodeEndpoint], Awaitable[ResultT]]) -> ResultT:
    """Return what the first daemon answers that does. Raises UnavailableError with the reasons of all."""
    reasons = []
    for daemon in daemons:
        try:
            return await ask(daemon)
        except (PeerError, RecoveryError) as error:
            reasons.append(str(error))
    raise UnavailableError("the cluster", "; ".join(reasons) or "no node is up that could be asked")


async def every_answer(
    session: ClusterSession,
    view: ClusterView,
    ask: "Callable[[NodeClient, NodeEndpoint], Awaitable[ResultT]]",
    *,
    most: int,
) -> dict[str, ResultT | str]:
    """Return what each node answers, or why it did not: of so many at most, the first by name."""

    async def asked(client: "NodeClient", node: NodeRecord) -> ResultT | str:
        try:
            return await ask(client, node.endpoint)
        except (PeerError, RecoveryError) as error:
            return str(error)

    names = sorted(view.nodes)[:most]
    async with node_client(session.identity) as client:
        answers = await asyncio.gather(*(asked(client, view.nodes[name]) for name in names))
    return dict(zip(names, answers, strict=True))


async def change(
    session: ClusterSession,
    what: str,
    changes_of: Callable[[ClusterView], "tuple[list[Compare], list[Change], ResultT]"],
) -> ResultT:
    """Do in one transaction what follows from the view; look again when another was faster. Return the third part.

    Raises ConflictError when that never ends. what: names what is changed.
    """
    for _ in range(MAX_ATTEMPTS):
        compares, changes, answer = changes_of(await session.view())
        try:
            if changes:
                await session.client.transaction(compares, changes)
            return answer
        except ConflictError:
            continue
    raise ConflictError(what, "keeps changing; try again")
