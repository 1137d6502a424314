"""The child processes of a local cluster: an etcd of one member, daemons that are restarted, a shell that cleans up."""

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, NoReturn, Self

import msgspec

from headway.daemon.base.errors import EXIT_CONFIG, ConfigError, StoreError, StoreUnreachableError
from headway.daemon.client.cluster_access import unless
from headway.daemon.cluster.client import EtcdClient
from headway.daemon.cluster.connection import EtcdAccess
from headway.stages.sockets.tls_identity import CA_FILE, CERTIFICATE_FILE, KEY_FILE, TlsIdentity

MEMBER_NAME = "headway"
PORT_IN_USE = "address already in use"
START_ATTEMPTS = 3
POLL_S = 0.02
KEPT_REVISIONS = 10_000
"""Number of revisions that etcd keeps when it compacts every five minutes. Without this its database would
only grow.
"""
QUOTA_BYTES = 2 * 2**30
"""Maximum size of the database; a full one refuses every write."""

TETHER = Path(__file__).with_name("tethered.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdServerConfig:
    """The settings of a server."""

    binary: Path
    data_dir: Path
    """Folder that outlives the server: a later server continues with all keys, under new ports and new certificates."""
    log_file: Path
    certificates: Path
    """Folder with ca.pem, cert.pem and key.pem; clients must present a certificate of that authority."""
    host: str = "127.0.0.1"
    client_port: int = 0
    """Port for clients; 0: a free one."""
    peer_port: int = 0
    ready_timeout_s: float = 30.0
    fsync: bool = True
    """True unless a power cut may lose keys, in tests."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Further flags of etcd, or other values for the flags set here."""


class EtcdServer:
    """A running etcd. Start it from a thread that lives as long as the process: etcd dies with that thread."""

    _process: subprocess.Popen[bytes]
    """The newest process, from `start` on."""

    def __init__(self, config: EtcdServerConfig, client_port: int, peer_port: int) -> None:
        self.config = config
        self.endpoint = f"{config.host}:{client_port}"
        """Address for clients, as host:port."""
        self._ports = client_port, peer_port

    @classmethod
    async def start(cls, config: EtcdServerConfig) -> Self:
        """Start etcd and return when it serves.

        Raises ConfigError when a port is in use or etcd refuses to start, and StoreUnreachableError when it is not
        ready in time; nothing is left running then.
        """
        for port in (config.client_port, config.peer_port):
            _check_port(config.host, port)
        config.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        config.data_dir.chmod(0o700)  # etcd warns about a more open mode
        config.log_file.parent.mkdir(parents=True, exist_ok=True)
        for attempt in range(1, START_ATTEMPTS + 1):
            server = cls(config, *_choose_ports(config))
            try:
                await server._up()
                return server
            except ConfigError as error:
                # A port chosen as free may have been taken since; one that the user named may not be replaced.
                if PORT_IN_USE not in error.what or attempt == START_ATTEMPTS:
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def peer_port(self) -> int:
        """Return the port for other members of its cluster."""
        return self._ports[1]

    @property
    def pid(self) -> int:
        """Return the pid of the etcd process."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Return the exit code; None while it runs."""
        return self._process.poll()

    def access(self, identity: TlsIdentity | None = None, *, timeout_s: float = 5.0) -> EtcdAccess:
        """Return its address and an identity for it: the server's own if no other is given."""
        identity = identity or TlsIdentity.read(self.config.certificates)
        return EtcdAccess(endpoints=(self.endpoint,), identity=identity, timeout_s=timeout_s)

    async def wait(self) -> int:
        """Return when the process has ended, with its exit code."""
        while (code := self._process.poll()) is None:
            await asyncio.sleep(POLL_S)
        return code

    async def restart(self) -> None:
        """Stop etcd if it runs, and restart it on its ports and data; return when it serves.

        Raises as `start` does.
        """
        await self.stop()
        for port in self._ports:
            _check_port(self.config.host, port)
        await self._up()

    async def kill(self) -> None:
        """Send SIGKILL; return when it is gone. Idempotent."""
        if self._process.poll() is None:
            self._process.kill()
            await self.wait()

    async def stop(self, *, timeout_s: float = 10.0) -> None:
        """Send SIGTERM, and SIGKILL when that is not enough within the deadline. Idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self.wait()
        await self.kill()

    async def _up(self) -> None:
        """Start the process, and return when it serves; raises as `start`."""
        # etcd reads every flag from a variable too, and a variable meant for another etcd would apply
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD")}
        arguments = [str(self.config.binary), *_flags(self.config, *self._ports)]
        self._process = tethered(arguments, log_path=self.config.log_file, environment=environment)
        try:
            await unless(self._answer(asyncio.get_running_loop().time() + self.config.ready_timeout_s), self._ended())
        except BaseException:
            await self.kill()
            raise

    async def _ended(self) -> NoReturn:
        code = await self.wait()
        lines = self.config.log_file.read_text(errors="replace").splitlines()
        raise ConfigError(f"etcd ended with code {code}: {_why_ended(lines)}", str(self.config.log_file))

    async def _answer(self, deadline: float) -> None:
        async with EtcdClient(self.access(timeout_s=1.0)) as client:
            while True:
                try:
                    if (await client.status()).has_leader:
                        return
                    reason = "no leader was elected"
                except StoreError as error:
                    reason = error.reason
                if asyncio.get_running_loop().time() >= deadline:
                    where = f"see {self.config.log_file}"
                    raise StoreUnreachableError(
                        f"etcd at {self.endpoint}",
                        f"was not ready within {self.config.ready_timeout_s:g} s ({reason}; {where})",
                    )
                await asyncio.sleep(POLL_S)


def tethered(arguments: Sequence[str], *, log_path: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process that dies with this one, and writes to a log. A terminal's Ctrl-C reaches this one only."""
    with log_path.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(TETHER), str(os.getpid()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )


def _why_ended(lines: list[str]) -> str:
    """Return what etcd says of its end. Its log is JSON, and a stack of Go functions may follow."""
    for line in reversed(lines):
        with suppress(msgspec.DecodeError, KeyError, TypeError):
            told = msgspec.json.decode(line)
            if told["level"] in ("fatal", "panic"):
                return f"{told['msg']}: {told.get('error', '')}".rstrip(": ")[:500]
    return lines[-1][:500] if lines else "it wrote nothing"


def _flags(config: EtcdServerConfig, client_port: int, peer_port: int) -> list[str]:
    client_url, peer_url = f"https://{config.host}:{client_port}", f"https://{config.host}:{peer_port}"
    certificate, key, ca = (str(config.certificates / name) for name in (CERTIFICATE_FILE, KEY_FILE, CA_FILE))
    values = {
        "name": MEMBER_NAME,
        "data-dir": config.data_dir,
        "listen-client-urls": client_url,
        "advertise-client-urls": client_url,
        "listen-peer-urls": peer_url,
        "initial-advertise-peer-urls": peer_url,
        "initial-cluster": f"{MEMBER_NAME}={peer_url}",
        "cert-file": certificate,
        "key-file": key,
        "trusted-ca-file": ca,
        "client-cert-auth": "true",
        "peer-cert-file": certificate,
        "peer-key-file": key,
        "peer-trusted-ca-file": ca,
        "peer-client-cert-auth": "true",
        # One member elects itself: it need not wait a second for an election.
        "heartbeat-interval": 20,
        "election-timeout": 200,
        "auto-compaction-mode": "revision",
        "auto-compaction-retention": KEPT_REVISIONS,
        "quota-backend-bytes": QUOTA_BYTES,
        "logger": "zap",
        "log-level": "warn",
        **config.flags,
    }
    flags = [f"--{name}={value}" for name, value in values.items()]
    return flags if config.fsync else [*flags, "--unsafe-no-fsync"]


def _check_port(host: str, port: int) -> None:
    """Raise ConfigError when another process listens there. Port 0 is always free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = "is in use" if PORT_IN_USE in str(error).lower() else f"cannot be used: {error.strerror}"
            raise ConfigError(f"port {port} {reason}", f"etcd on {host}") from error


def _choose_ports(config: EtcdServerConfig) -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        for probe in (first, second):  # both sockets are held at once, so that the ports differ
            probe.bind((config.host, 0))
        return config.client_port or first.getsockname()[1], config.peer_port or second.getsockname()[1]


WILL_TIMEOUT_S: Final = 10.0
_DO_ALL = """
all=""
while IFS= read -r command; do all="$all
$command"; done
eval "$all" >/dev/null 2>&1
exit 0
"""
_SWEEP = (
    'is_any_left() { for each; do [ -e "$each" ] && return 0; done; return 1; }; '
    'for attempt in 1 2 3 4 5 6 7 8; do is_any_left "$@" || exit 0; rm -rf -- "$@"; sleep 0.5; done'
)
"""More than once, because children of a killed process write until they are gone too."""


class LastWill:
    """Commands that a shell runs when this process ends, however it ends, or at `close`.

    The shell reads them from a pipe, whose end is this process's end. A command that runs after a clean end finds
    nothing to do.
    """

    def __init__(self) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _DO_ALL, "headway-last-will"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._told: set[str] = set()

    def promise(self, *command: str) -> None:
        """Have a command run at the end, once however often it is promised."""
        line = shlex.join(command)
        if line in self._told:
            return
        assert "\n" not in line, "one command is one line"
        assert self._shell.stdin is not None
        self._shell.stdin.write(line.encode() + b"\n")
        self._shell.stdin.flush()
        self._told.add(line)

    def close(self) -> None:
        """Run the commands now. Idempotent."""
        if self._shell.stdin is not None and not self._shell.stdin.closed:
            self._shell.stdin.close()
        self._shell.wait(WILL_TIMEOUT_S)


def will_that_sweeps(paths: Sequence[Path]) -> LastWill:
    """Return a will that deletes folders and files."""
    will = LastWill()
    will.promise("sh", "-c", _SWEEP, "sweep", *map(str, paths))
    return will


FIRST_BACKOFF_S: Final = 0.2
MAX_BACKOFF_S: Final = 10.0
HEALTHY_AFTER_S: Final = 10.0
MAX_FALSE_STARTS: Final = 5
"""Number of failed starts in a row after which a daemon counts as one that does not start."""
SELDOM_S: Final = 60.0
"""Interval of attempts to start such a daemon."""


@dataclass(slots=True, kw_only=True)
class NodeProcess:
    """The process of a daemon, replaced after each death."""

    name: str
    flags: Mapping[str, object]
    """Flags of NodeConfig, except `listen`."""
    environment: Mapping[str, str]
    """Variables in addition to ours."""
    log_path: Path
    port: int = 0
    """Port where it listened, so that it keeps its address; 0: not known yet."""
    process: "subprocess.Popen[bytes]" = field(init=False)
    started_at: float = field(init=False)
    num_restarts: int = 0
    _began: float = 0.0
    _num_quick: int = 0
    _num_false_starts: int = 0
    _restart_at: float | None = None
    _is_failing: bool = False

    def __post_init__(self) -> None:
        self._spawn()

    @property
    def pid(self) -> int:
        """Return the pid of the newest process."""
        return self.process.pid

    @property
    def has_left(self) -> bool:
        """Return whether it ended cleanly, on request."""
        return self.process.poll() == 0

    @property
    def failure(self) -> str:
        """Return why it does not start, between rare attempts; empty: it runs, or the next attempt is near."""
        return self.last_words if self._is_failing and self.process.poll() is not None else ""

    @property
    def last_words(self) -> str:
        """Return how it ended, with the last line that it wrote."""
        text = self.log_path.read_text(errors="replace").strip()
        last = text.splitlines()[-1][:300] if text else "it wrote nothing"
        return f"its daemon ended with status {self.process.returncode}: {last} (see {self.log_path})"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal if it runs."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def keep_up(self) -> bool:
        """Restart the daemon if it died and its pause is over; call this repeatedly. Return whether it was started."""
        ended = self.process.poll()
        if ended is None or ended == 0:
            return False
        if self._restart_at is None:
            self._rest(ended)
        if self._restart_at is None or time.monotonic() < self._restart_at:
            return False
        self._restart_at = None
        self.num_restarts += 1
        self._spawn()
        return True

    def _rest(self, ended: int) -> None:
        is_quick = time.monotonic() - self._began < HEALTHY_AFTER_S
        self._num_quick = self._num_quick + 1 if is_quick else 1
        self._num_false_starts = self._num_false_starts + 1 if is_quick and ended > 0 else 0
        is_misconfigured = ended == EXIT_CONFIG and not self.port
        self._is_failing = is_misconfigured or self._num_false_starts >= MAX_FALSE_STARTS
        pause_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** (self._num_quick - 1))
        self._restart_at = time.monotonic() + (SELDOM_S if self._is_failing else pause_s)
        if ended == EXIT_CONFIG:
            self.port = 0  # another process may have taken the port in the meantime

    def _spawn(self) -> None:
        flags = {**self.flags, "name": self.name, "listen": f"127.0.0.1:{self.port}"}
        words = (f"--{flag.replace('_', '-')}={_text(value)}" for flag, value in flags.items())
        command = [sys.executable, "-m", "headway.daemon.cli.main", "daemon", *words]
        self.started_at, self._began = time.time(), time.monotonic()
        self.process = tethered(command, log_path=self.log_path, environment={**os.environ, **self.environment})


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
