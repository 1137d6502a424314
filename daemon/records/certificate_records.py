"""Records about certificates, by the name that they bear. Pure."""

from dataclasses import dataclass


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
    valid_s: float
    """How long the next one lasts."""
    hosts: tuple[str, ...] = ()
    key_sha256: str = ""
    """Digest of the public key; empty: it was issued by an earlier release."""
    renews: str = ""
    """Serial number of the certificate with which it was asked for; empty: an invitation was used."""
    seal: str = ""
    """HMAC-SHA-256 under a key of the authority: what it renews rests on this record, and every node writes to etcd."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RevokedRecord:
    """`revoked/<name>`: no certificate of this name counts any more."""

    name: str
    revoked_at: float
    revoked_by: str = ""
    """`user@host`"""
