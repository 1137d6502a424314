"""A node's settings as one typed value: each is a key of the file, a variable and a flag of `headway daemon`."""

import hashlib
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from headway.daemon.base.machine_share import folder_in_memory

UNNAMED_SITE = "default"
"""Site of a node without a `site` setting: the network between two such nodes is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """One node's settings. Every field is a key of the file, a variable HEADWAY_<FIELD>, and a flag with this help."""

    name: str = ""
    """The node's name; the host's when not given."""
    etcd: tuple[str, ...] = ("127.0.0.1:2379",)
    """HOST:PORT of each etcd member, separated by commas."""
    etcd_user: str = ""
    """User of an etcd with passwords."""
    etcd_password_file: Path | None = None
    """File with that user's password."""
    certificates: Path = Path("/etc/headway/certificates")
    """Folder with ca.pem, cert.pem and key.pem (also HEADWAY_CERTS)."""
    authority: Path | None = None
    """Folder of the cluster's authority: this daemon answers `headway invite`, and signs. Needs --one-port."""
    listen: str = "0.0.0.0:0"
    """HOST:PORT to listen on; port 0 takes a free port."""
    advertise_host: str = ""
    """Name or address at which other machines dial this one; when not given, that of --listen or of this machine."""
    one_port: bool = False
    """Workers are dialled through the port of --listen too: a node needs one open."""
    announce: str = ""
    """HOST:PORT that others dial, if a router maps it to the one port."""
    relay: str = ""
    """HOST:PORT of each relay through which others reach this node, which only dials; or auto."""
    worker_ports: str = ""
    """Ports where workers and spares listen, such as 7100-7107; free ports when not given."""
    site: str = UNNAMED_SITE
    """Nodes of one site have a fast network between them, and stay neighbours in the pipeline."""
    site_is_private: bool = False
    """Nobody else is on the site's network: there large tensors between CPU workers are not encrypted, unless the
    job says link = "grpc".
    """
    state_dir: Path = Path("/var/lib/headway")
    """Folder of the state that survives a restart: generations seen, logs of jobs."""
    store_dir: Path | None = None
    """Folder of layer files, wiped at start; in memory when not given."""
    store_quota_bytes: int = 0
    """Maximum size of the store; 0: the size of the file system."""
    transfer_mbit_s: float = 0.0
    """Maximum network rate of copies, checkpoints and exports for which no worker waits; 0: no limit."""
    cache_dir: Path | None = None
    """Folder of token shards; below --state-dir when not given."""
    history_dir: Path | None = None
    """Folder in which to record the history, with each operation of the workers."""
    allowed_places: tuple[str, ...] = ()
    """Paths and URLs, separated by commas, below which all that a job names has to lie; when not given, anywhere but
    in the system's own folders.
    """
    allow_plugins: tuple[str, ...] = ()
    """Wheels of plug-ins whose code this node runs, by SHA-256, separated by commas; or any. When not given, none."""
    checkpoint_root: Path | None = None
    """Root of a relative checkpoint_dir: only clusters on one machine have one."""
    devices: Literal["auto", "cpu", "cuda"] = "auto"
    """Device type on which workers compute."""
    num_devices: int = 0
    """Number of workers on this node; 0: one per device."""
    card_sharers: int = 1
    """Number of daemons on this machine that share each of its cards, and its memory."""
    cuda_reserve_gib: float | None = None
    """Memory of each CUDA device that plans leave free, GiB; when not given, 1 GiB and 4 % of it."""
    num_spares: int = 1
    """Number of spare worker processes, which hold no device until a worker dies."""
    lease_ttl_s: int = 5
    """Seconds of silence after which the node counts as dead."""
    quarantine_after: int = 3
    """Number of failures within ten minutes after which plans leave a node out; 0: never. The leader's setting
    counts.
    """
    ended_jobs_kept: int = 200
    """Number of ended jobs that are kept; older ones are retired. The leader's setting counts."""
    stop_timeout_s: float = 120.0
    """Maximum wait for the stop boundary."""
    preemption: Literal["none", "aws", "gcp", "azure"] = "none"
    """Leave when this cloud announces that it takes the spot machine away."""
    preemption_server: str = ""
    """HOST:PORT of the metadata server; the cloud's own when not given."""
    metrics_listen: str = ""
    """HOST:PORT for Prometheus; off when not given."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum level."""
    log_format: Literal["auto", "json", "console"] = "auto"
    """auto: JSON in a pipe."""

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
