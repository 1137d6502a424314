"""The records in etcd that belong to the cluster as a whole: who leads, failures of nodes, and users' shares."""

from dataclasses import dataclass, field

from headway.daemon.cluster.records import Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderRecord:
    """`leader`, leased: the daemon that coordinates."""

    node: str
    incarnation: str
    quarantine_after: int = 3
    """Failures of a node after which its plans leave the node out; 0: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFailureRecord:
    """`failures/<node>/<number>`, under a lease of QUARANTINE_S: a failure of a node. Enough of them exclude the node.

    etcd counts the time, so that no node's clock matters.
    """

    at: float
    text: str
    job: str = ""
    """Job in which it failed; empty: the record is older than this field."""
    is_jobs_error: bool = False
    """True if the error may be the job's, because a worker reported it: for other jobs, all such of one job
    count once.
    """
    incarnation: str = ""
    """Incarnation of the lost daemon; empty: the daemon is alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRecord:
    """`placement`: the last plan that was given devices.

    Every transaction that gives devices to a job compares and writes this key. So two decisions from one stale view
    cannot both give a device away.
    """

    job: str
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesRecord:
    """`shares`: an administrator's division of the cluster between users."""

    weights: dict[str, float] = field(default_factory=dict)
    """Weights by user; the default is 1."""
    slice_s: float = 600.0
    """Minimum time in seconds that a started job runs before another may stop it."""
    half_life_s: float = 7200.0
    """Age at which past use counts half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecord:
    """`usage`: each user's recent use, written by the leader once a minute while jobs have devices."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Device-seconds by user; older ones have decayed."""
    at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetiredRecord:
    """`retired/<job>`: a job that was removed, or that ended long ago. A later job may take its name."""

    phase: Phase
    """The phase in which it ended."""
    generation: int
    """Highest generation of all jobs of this name. A later job of the name begins above it, so that no number is used
    twice.
    """
    since: float = 0.0
    """Seconds since the epoch at which it ended."""
    retired_at: float = 0.0
    batch: int = -1
    """Last batch whose loss was known; -1: none."""
    loss: float = 0.0
    checkpoint: str = ""
    """Folder of its newest checkpoint, which stays; empty: it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InvitationRecord:
    """`invitations/<name>`, leased until it expires: one key may join under this name."""

    name: str
    role: str
    hosts: tuple[str, ...]
    """Other names and addresses for the certificate."""
    etcd: tuple[str, ...]
    """The members of etcd, as the new machine dials them."""
    secret_sha256: str
    expires_at: float
    """By the clock of the daemon with the authority, in seconds since 1970."""
    valid_s: float
    """How long each of its certificates lasts."""
    replaces: str = ""
    """Serial number of the certificate of this name that another one may follow; empty: the name has to be free."""
    key_sha256: str = ""
    """Digest of the public key that has joined with it: only its holder may ask again; empty: nobody has joined."""
    invited_by: tuple[str, ...] = ()
    """Names in the certificate of the operator who asked for it. If one of them is revoked, nobody joins with it."""
    seal: str = ""
    """Proves that a daemon with the authority wrote it: everyone who may write to etcd could write another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedRecord:
    """`issued/<name>`: the newest certificate of a name that was made for an invitation."""

    name: str
    role: str
    serial: str
    """In hexadecimal digits, as openssl prints it."""
    issued_at: float
    expires_at: float
    key_sha256: str = ""
    """Digest of the public key."""
    renews: str = ""
    """Serial number of the certificate with which it was asked for; empty: an invitation was used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RevokedRecord:
    """`revoked/<name>`: no certificate of this name counts any more."""

    name: str
    revoked_at: float
    revoked_by: str = ""
    """`user@host`"""
