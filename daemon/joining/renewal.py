"""When a certificate is renewed, and for whom the authority does it.

A certificate that came by an invitation is short-lived, and its holder asks for the next one with it, and with another
key. The name and the role stay, and each certificate is renewed once. An answer may be lost after it was noted: then
its holder asks again with the same new key, and gets a certificate for that.
"""

from datetime import UTC, datetime, timedelta
from typing import Final

from cryptography import x509

from headway.daemon.joining.invitation import RefusedError
from headway.daemon.records.certificate_records import IssuedRecord
from headway.daemon.rpc.certificates import CLOCK_SKEW

LEFT: Final = 1 / 3
"""Share of its life that a certificate still has when it is renewed."""
MOST_SPREAD: Final = 1 / 30
"""Share of a life by which nodes that joined together ask at other times."""


def due_at(certificate: x509.Certificate, *, spread: float = 0.0) -> float:
    """Return when to renew a certificate, in seconds since 1970. spread: this node's place from 0 to 1 among others."""
    first, last = certificate.not_valid_before_utc + CLOCK_SKEW, certificate.not_valid_after_utc
    life = max(last - first, timedelta())
    return (last - life * (LEFT - MOST_SPREAD * spread)).timestamp()


def check_renewal(
    issued: IssuedRecord | None, serial: str, key_sha256: str, *, name: str, is_revoked: bool, now: datetime
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
    if now >= datetime.fromtimestamp(issued.expires_at, UTC):
        raise RefusedError(f"the certificate of {name} has expired: invite it again")
    return issued
