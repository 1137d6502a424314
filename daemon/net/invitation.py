"""Who may join: what an invitation promises, and what the authority signs for it. Pure.

An invitation lies in etcd, where every node can write. So the daemon with the authority seals it with a key that only
holders of the authority's key know, and takes no other one. It keeps the digest of the secret, not the secret.
"""

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from headway.daemon.base.addresses import NODE_NAME_RULE, is_node_name
from headway.daemon.base.errors import ConfigError
from headway.daemon.cluster.cluster_records import InvitationRecord, IssuedRecord
from headway.daemon.cluster.format import encode
from headway.stages.sockets.roles import Role

MIN_LIFE_S: Final = 10.0
MAX_INVITATION_S: Final = 30 * 86400.0
MAX_VALID_S: Final = 3650 * 86400.0
MAX_HOSTS: Final = 16
MAX_MEMBERS: Final = 16
NO_INVITATION: Final = "the invitation is not valid: it was used, has expired or was replaced; ask for another one"
"""The only thing that a stranger learns, whatever is wrong."""
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass
class RefusedError(Exception):
    """The authority signs nothing. The reason is one line for whoever asked."""

    reason: str

    def __str__(self) -> str:
        return self.reason


def checked(invitation: InvitationRecord, *, lasts_s: float) -> InvitationRecord:
    """Return an invitation that may be made. Raises RefusedError.

    lasts_s: time until it expires.
    """
    if not is_node_name(invitation.name):
        raise RefusedError(f"{invitation.name!r} cannot be a name: one has {NODE_NAME_RULE}")
    if invitation.role not in tuple(Role):
        raise RefusedError(f"there is no role {invitation.role!r}, but {', '.join(Role)}")
    if not MIN_LIFE_S <= lasts_s <= MAX_INVITATION_S:
        raise RefusedError("an invitation lasts from 10 seconds to 30 days")
    if not MIN_LIFE_S <= invitation.valid_s <= MAX_VALID_S:
        raise RefusedError("a certificate lasts from 10 seconds to ten years")
    if len(invitation.hosts) > MAX_HOSTS or not 1 <= len(invitation.etcd) <= MAX_MEMBERS:
        raise RefusedError(f"at most {MAX_HOSTS} hosts and {MAX_MEMBERS} members of etcd, and at least one of them")
    if len(invitation.invited_by) > MAX_HOSTS + 1:
        raise RefusedError(f"a certificate of more than {MAX_HOSTS + 1} names invites nobody")
    return invitation


def sealed(invitation: InvitationRecord, seal_key: bytes) -> InvitationRecord:
    """Return an invitation with its seal."""
    bare = replace(invitation, seal="")
    return replace(bare, seal=hmac.new(seal_key, encode(bare), hashlib.sha256).hexdigest())


def is_true(invitation: InvitationRecord, seal_keys: Iterable[bytes]) -> bool:
    """Return whether an invitation is as an authority has written it: every node can write to etcd."""
    seals = [sealed(invitation, key).seal for key in seal_keys]
    return any(hmac.compare_digest(invitation.seal.encode(), seal.encode()) for seal in seals)


def check_secret(invitation: InvitationRecord | None, secret: bytes, *, seal_keys: Iterable[bytes], now: float) -> None:
    """Raise RefusedError unless the holder of a secret was invited, and the invitation is true and has not expired."""
    told = hashlib.sha256(secret).hexdigest()
    if invitation is None:
        raise RefusedError(NO_INVITATION)
    is_known = hmac.compare_digest(invitation.secret_sha256.encode(), told.encode())
    if not (is_true(invitation, seal_keys) and is_known and now < invitation.expires_at):
        raise RefusedError(NO_INVITATION)


def check_key(invitation: InvitationRecord, issued: IssuedRecord | None, key_sha256: str) -> None:
    """Raise RefusedError unless nobody has joined with an invitation, or this key has, and was not renewed since.

    An answer may be lost after it was noted. Then its holder asks again with the same key, and nobody else may.
    """
    if not invitation.key_sha256:
        return
    is_newest = issued is not None and issued.key_sha256 == key_sha256 and not issued.renews
    if not is_newest or invitation.key_sha256 != key_sha256:
        raise RefusedError(NO_INVITATION)


def check_names(name: str, role: str, asked: Iterable[str], *, role_uri: str) -> None:
    """Raise RefusedError for a request that names anybody else, or another role, than the one that is certified."""
    for other in asked:
        if other not in (name, f"{role_uri}{role}"):
            raise RefusedError(f"the request is for {other}, and the invitation for {role} {name}")


def check_free(
    name: str,
    issued: IssuedRecord | None,
    *,
    is_member: bool,
    now: float,
    replaces: str = "",
    is_revoked: bool = False,
) -> None:
    """Raise RefusedError when somebody else may have this name: a living node, or the holder of a certificate.

    replaces: serial number of the certificate whose holder is not meant. is_revoked: no certificate of the name counts,
    so a new one would not either.
    """
    if is_revoked:
        raise RefusedError(f"{name} is revoked: take another name, or undo it with `headway certs restore {name}`")
    if issued is not None and now < issued.expires_at and issued.serial != replaces:
        raise RefusedError(f"{name} has a certificate: invite it with --again if its machine is lost or set up anew")
    if is_member:
        raise RefusedError(f"node {name} is in the cluster: stop its daemon, or take another name")


def read_duration(text: str, flag: str) -> float:
    """Return the seconds of 90s, 30m, 1h or 7d. Raises ConfigError, naming the flag."""
    number, unit = text[:-1], text[-1:]
    if unit not in _UNITS or not number.isascii() or not number.isdigit() or len(number) > len("123456789"):
        raise ConfigError(f"{text!r} is not a time such as 90s, 30m, 1h or 7d", flag)
    return int(number) * _UNITS[unit]


def check_renewal(
    issued: IssuedRecord | None, serial: str, key_sha256: str, *, name: str, is_revoked: bool, now: float
) -> IssuedRecord:
    """Return what was issued, if the holder of a certificate may have the next one. Raises RefusedError.

    serial: of the certificate that it shows. key_sha256: digest of the public key for the next one.
    """
    if is_revoked:
        raise RefusedError(f"{name} is revoked: take another name, or undo it with `headway certs restore {name}`")
    if issued is None:
        raise RefusedError(f"the certificate of {name} came by no invitation: make the next one with `headway certs`")
    is_newest = serial == issued.serial
    is_repeated = serial == issued.renews and key_sha256 == issued.key_sha256
    if not is_newest and not is_repeated:
        what = f"{name} has a newer certificate than this one, which is not renewed again"
        raise RefusedError(f"{what}: `headway invite {name} --again` gives its machine another one")
    if now >= issued.expires_at:
        raise RefusedError(f"the certificate of {name} has expired: invite it again")
    return issued
