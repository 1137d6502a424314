"""The settings of one node: a file, the environment and flags, in rising priority, as one typed value."""

import difflib
import hashlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import inf
from pathlib import Path
from typing import Any, Literal

import msgspec

from headway.daemon.addresses import NODE_NAME_RULE, is_node_name, read_ports, split_address
from headway.daemon.errors import ConfigError
from headway.daemon.etcd.members import read_members
from headway.daemon.jobs.bounds import MAX_TEXT
from headway.daemon.jobs.typed_toml import parse_toml, read_text
from headway.daemon.machine_share import folder_in_memory
from headway.daemon.node.relays import read_relays
from headway.daemon.storage.allowed_places import check_places

ENVIRONMENT_PREFIX = "HEADWAY_"
UNNAMED_SITE = "default"
"""Site of a node without a `site` setting: the network between two such nodes is unknown."""
CLIENT_CERTIFICATES = "HEADWAY_CERTS"
"""Clients' variable for their folder of certificates: it counts for a daemon without a certificates setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """One node's settings. Every field is a key of the file, a variable HEADWAY_<FIELD> and a flag."""

    name: str = ""
    """The node's name in the cluster; the host name when empty."""
    etcd: tuple[str, ...] = ("127.0.0.1:2379",)
    """The etcd members, each as host:port, optionally with https://; in the environment separated by commas."""
    etcd_user: str = ""
    etcd_password_file: Path | None = None
    certificates: Path = Path("/etc/headway/certificates")
    """Folder with ca.pem, cert.pem and key.pem; if no setting names one, HEADWAY_CERTS does, as for clients."""
    authority: Path | None = None
    """Folder of the cluster's authority, as `headway certs` made it: this daemon invites and signs. Needs one_port."""
    listen: str = "0.0.0.0:0"
    """Address of the Node service as host:port; port 0 takes a free one."""
    advertise_host: str = ""
    """Name or address of this machine that others dial; when empty, the host of `listen`, or this machine's name."""
    one_port: bool = False
    """True if its workers are dialled through the port of `listen` as well, so that a node needs one open port."""
    announce: str = ""
    """host:port that others dial, if a router maps it to the port of `listen`; needs one_port."""
    relay: str = ""
    """host:port of each relay where this node stands by, because others cannot dial it, separated by commas; `auto`:
    any nodes with one_port. Needs one_port.
    """
    worker_ports: str = ""
    """Ports where its workers listen, such as 7100-7107; empty: free ones. Each worker and each spare needs one."""
    site: str = UNNAMED_SITE
    """Nodes of one site have a fast network between them."""
    site_is_private: bool = False
    """True if the site's network is private: its machines may then send large tensors to each other without
    encryption.
    """
    state_dir: Path = Path("/var/lib/headway")
    """Folder of the state that survives a restart: generations seen, logs of jobs."""
    store_dir: Path | None = None
    """Folder of layer files, wiped at start; in memory when unset and the machine allows it."""
    store_quota_bytes: int = 0
    """Maximum size of the store; 0: the size of the file system."""
    transfer_mbit_s: float = 0.0
    """Maximum rate of sent copies, checkpoints and exports, Mbit/s together; 0: no limit.

    Transfers for which a worker waits are never slowed down.
    """
    cache_dir: Path | None = None
    """Folder of token shards; below `state_dir` when unset."""
    history_dir: Path | None = None
    """Folder in which to record the history, with each operation of the workers; off when unset."""
    allowed_places: tuple[str, ...] = ()
    """Folders and URLs below which jobs' data, checkpoints and models may lie on this node; empty: anywhere but in the
    system's own folders. In the environment separated by commas.
    """
    checkpoint_root: Path | None = None
    """Root of a job's relative `checkpoint_dir`. Only clusters on one machine have such a place."""
    devices: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: every CUDA device, or the CPU when there is none."""
    num_devices: int = 0
    """Number of workers on this node; 0: one per CUDA device, one on the CPU."""
    card_sharers: int = 1
    """Number of daemons that share each of this node's cards; each uses its part of a card's memory."""
    cuda_reserve_gib: float | None = None
    """Memory of each CUDA device that plans leave free, GiB; when unset, 1 GiB and 4 % of the device's memory."""
    num_spares: int = 1
    """Number of spare worker processes, which hold no device until a worker dies. Each costs the memory of a Python
    process.
    """
    lease_ttl_s: int = 5
    """Seconds of silence after which the node counts as dead."""
    quarantine_after: int = 3
    """Number of failures within ten minutes that exclude a node from plans; 0: never. The leader's setting counts.

    Unless it is 0, running jobs also wait longer each time before they move to a node that repeatedly leaves and joins.

    """
    ended_jobs_kept: int = 200
    """Number of ended jobs whose records stay in etcd; the oldest beyond it are retired. The leader's setting counts.

    Of a retired job `status` shows one line; its checkpoints stay.

    """
    ended_jobs_kept_days: float = 30.0
    """Days after its end at which a job is retired; 0: its age does not matter. The leader's setting counts.

    The leader's own daemon must have seen the end for as long: no date of a clock is trusted.

    """
    stop_timeout_s: float = 120.0
    """Maximum wait for the stop boundary of a clean leave."""
    preemption: Literal["none", "aws", "gcp", "azure"] = "none"
    """The cloud that is asked whether it is about to take this machine away; then the daemon leaves at once."""
    preemption_server: str = ""
    """host:port of its metadata server; the cloud's own when empty."""
    metrics_listen: str = ""
    """Address for Prometheus as host:port, over plain HTTP; empty: off."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "json", "console"] = "auto"
    """`auto`: JSON unless stderr is a terminal."""

    @property
    def secrets(self) -> list[Path]:
        """Return the folders and files that no job may name."""
        told = (self.certificates, self.renewals_dir, self.authority, self.etcd_password_file)
        return [path for path in told if path is not None]

    @property
    def folders_of_jobs(self) -> list[tuple[str, Path]]:
        """Return the local folders where jobs read and write, each with its setting."""
        told = [("allowed_places", Path(place)) for place in self.allowed_places if Path(place).is_absolute()]
        return told if self.checkpoint_root is None else [*told, ("checkpoint_root", self.checkpoint_root)]

    @property
    def renewals_dir(self) -> Path:
        """Return the folder of renewed certificates."""
        return self.state_dir / "certificates"

    @property
    def data_cache_dir(self) -> Path:
        """Return the folder of token shards."""
        return self.cache_dir or self.state_dir / "data"

    @property
    def logs_dir(self) -> Path:
        """Return the folder of the workers' output, one file per job."""
        return self.state_dir / "logs"

    @property
    def layer_store_dir(self) -> Path:
        """Return the folder of layer files: below `store_dir`, or in memory for this node alone, or below `state_dir`.

        It is emptied at each start, so it is never a folder that people name: that may have files of theirs.
        """
        if self.store_dir is not None:
            return self.store_dir / "headway-layers"
        digest = hashlib.sha256(os.fsencode(self.state_dir.resolve())).hexdigest()[:8]
        parent = folder_in_memory()  # where other nodes of this machine keep theirs too
        return parent / f"headway-{os.getuid()}-{self.name}-{digest}" if parent else self.state_dir / "store"


FIELD_NAMES = tuple(field.name for field in fields(NodeConfig))
NOT_NEGATIVE = (
    "num_devices",
    "num_spares",
    "store_quota_bytes",
    "quarantine_after",
    "stop_timeout_s",
    "ended_jobs_kept",
    "ended_jobs_kept_days",
)
LISTS = ("etcd", "allowed_places")
"""Keys with several values, which the environment and flags separate by commas."""


def read_node_config(
    path: Path | None = None, environment: Mapping[str, str] | None = None, flags: Mapping[str, object] | None = None
) -> NodeConfig:
    """Return settings from a TOML file, the environment (os.environ if None) and flags; later ones override earlier
    ones.

    Only HEADWAY_CERTS has a lower priority than the file. A flag that is None was not given. Raises ConfigError, naming
    the file, variable or flag and the nearest valid name.

    """
    environment = os.environ if environment is None else environment
    settings: dict[str, tuple[str, object]] = {}
    if told := environment.get(CLIENT_CERTIFICATES):
        settings["certificates"] = (CLIENT_CERTIFICATES, told)
    if path is not None:
        settings |= {key: (str(path), value) for key, value in _from_file(path).items()}
    settings |= _from_environment(environment)
    settings |= {key: (_flag(key), value) for key, value in (flags or {}).items() if value is not None}
    for key, (where, _) in settings.items():
        if key not in FIELD_NAMES:
            raise ConfigError(f"unknown key {key!r}{_nearest(key)}", where)
    config = _convert(settings)
    return _checked(config, settings)


def advertised_host(config: NodeConfig) -> str:
    """Return the host that others dial: the setting, or the listening host, or, if that is a wildcard, the machine's
    name.
    """
    if config.advertise_host:
        return config.advertise_host.strip("[]")
    host, _ = listen_address(config)
    return socket.gethostname() if host in ("0.0.0.0", "::", "") else host


def listen_address(config: NodeConfig) -> tuple[str, int]:
    """Return host and port of `listen`. Raises ConfigError when it is not host:port."""
    return split_address(config.listen, "listen")


def check_worker_ports(config: NodeConfig, num_devices: int) -> None:
    """Raise ConfigError when `worker_ports` has fewer ports than the node has workers and spares."""
    num_needed = num_devices + config.num_spares
    if config.worker_ports and len(read_ports(config.worker_ports, "worker_ports")) < num_needed:
        what = f"{num_devices} workers and {config.num_spares} spares need {num_needed} ports"
        raise ConfigError(f"{config.worker_ports!r}: {what}", "worker_ports")


def _from_file(path: Path) -> dict[str, Any]:
    return parse_toml(read_text(path, "settings file"), str(path))


def _from_environment(environment: Mapping[str, str]) -> dict[str, tuple[str, object]]:
    """Return the variables named after fields. Others belong to other programs, unless they look like a
    typing error.
    """
    settings: dict[str, tuple[str, object]] = {}
    for variable, text in environment.items():
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        key = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if key in FIELD_NAMES:
            settings[key] = (variable, tuple(text.split(",")) if key in LISTS else text)
        elif close := difflib.get_close_matches(key, FIELD_NAMES, n=1, cutoff=0.85):
            raise ConfigError(f"unknown variable; did you mean {ENVIRONMENT_PREFIX}{close[0].upper()}?", variable)
    return settings


def _convert(settings: Mapping[str, tuple[str, object]]) -> NodeConfig:
    for key, (where, value) in settings.items():
        try:
            msgspec.convert({key: value}, NodeConfig, strict=False, dec_hook=_decode_path)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{key} = {value!r}: {str(error).split(' - at')[0]}", where) from error
    values = {key: value for key, (_, value) in settings.items()}
    config = msgspec.convert(values, NodeConfig, strict=False, dec_hook=_decode_path)
    return config if config.name else replace(config, name=socket.gethostname())


def _checked(config: NodeConfig, settings: Mapping[str, tuple[str, object]]) -> NodeConfig:
    def refuse(key: str, what: str) -> ConfigError:
        value = getattr(config, key)
        told = repr(str(value) if isinstance(value, Path) else value)
        return ConfigError(f"{key} = {told}: {what}", settings[key][0] if key in settings else "")

    if not is_node_name(config.name):
        raise refuse("name", f"a node's name is {NODE_NAME_RULE}; give one with --name")
    if not config.site or len(config.site) > MAX_TEXT or not config.site.isprintable():
        raise refuse("site", f"a site's name is 1 to {MAX_TEXT} printable characters")
    if config.site_is_private and config.site == UNNAMED_SITE:
        raise refuse("site_is_private", "name the site with `site`, with the same name on all of its nodes")
    if config.lease_ttl_s < 1:
        raise refuse("lease_ttl_s", "at least 1 second")
    if config.transfer_mbit_s != 0.0 and not 1.0 <= config.transfer_mbit_s < inf:
        raise refuse("transfer_mbit_s", "at least 1 Mbit/s, or 0 for no limit")
    for key in NOT_NEGATIVE:
        if getattr(config, key) < 0:
            raise refuse(key, "must not be negative")
    if config.cuda_reserve_gib is not None and not 0 <= config.cuda_reserve_gib < inf:
        raise refuse("cuda_reserve_gib", "at least 0 GiB")
    if config.card_sharers < 1:
        raise refuse("card_sharers", "at least 1, this daemon")
    if config.etcd_user and config.etcd_password_file is None:
        raise refuse("etcd_user", "needs etcd_password_file too")
    _, port = listen_address(config)
    if config.worker_ports and port in read_ports(config.worker_ports, "worker_ports"):
        raise refuse("worker_ports", f"has the daemon's own port {port}, which `listen` names")
    if config.one_port and config.worker_ports:
        raise refuse("worker_ports", "with one_port, workers have no ports of their own; leave one of the two out")
    if config.announce:
        if not config.one_port:
            raise refuse("announce", "needs one_port = true: a router maps one port, and workers have others")
        split_address(config.announce, "announce")
    if config.authority is not None and not config.one_port:
        what = "needs one_port = true (--one-port): new machines have no certificate, and only that port hears them"
        raise refuse("authority", what)
    if config.relay:
        if not config.one_port or config.announce:
            raise refuse("relay", "needs one_port = true and no announce: others reach this node there alone")
        read_relays(config.relay, "relay")
    if config.metrics_listen:
        split_address(config.metrics_listen, "metrics_listen")
    if config.preemption_server:
        split_address(config.preemption_server, "preemption_server")
    try:
        check_places(config.allowed_places)
    except ConfigError as error:
        raise refuse("allowed_places", str(error)) from error
    where = settings["etcd"][0] if "etcd" in settings else "etcd"
    return replace(config, etcd=read_members(config.etcd, where, has_certificates=True))


def _decode_path(_: type, value: object) -> Path:
    if isinstance(value, str):
        try:
            return Path(value).expanduser()
        except RuntimeError as error:
            raise msgspec.ValidationError(f"Expected a path, got `{value}`: {error} Set HOME") from error
    if isinstance(value, Path):
        return value
    raise msgspec.ValidationError(f"Expected a path, got `{type(value).__name__}`")


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _nearest(key: str) -> str:
    close = difflib.get_close_matches(key, FIELD_NAMES, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
