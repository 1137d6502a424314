"""Checks this side's own certificate: a peer that refuses it often cannot, or does not, say why."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from headway.daemon.errors import ConfigError
from headway.daemon.rpc.certificates import names_in
from headway.stages.sockets.roles import Role, holder, roles_among
from headway.stages.sockets.tls_identity import CERTIFICATE_FILE, KEY_FILE, TlsIdentity

NEAR: Final = timedelta(days=14)
_CLIENTS, _SERVERS = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH
_PURPOSES: Final = {_CLIENTS: "clients (clientAuth)", _SERVERS: "servers (serverAuth)"}


def read_certificate(pem: bytes, where: str) -> x509.Certificate:
    """Return the first certificate of a PEM file. Raises ConfigError, naming the file."""
    try:
        found = x509.load_pem_x509_certificate(pem)
        _ = found.extensions  # the library reads them when it is asked
    except Exception as error:  # and it raises errors of many kinds
        raise ConfigError("is not a certificate in PEM", where) from error
    return found


def check_own_certificate(
    certificate: x509.Certificate, where: str, *, serves: bool, now: datetime | None = None
) -> None:
    """Raise ConfigError, naming the file and what to do, for a certificate that every peer refuses.

    serves: whether this side also listens. now: by this machine's clock if None.
    """
    check_dates(certificate, where, now=now or datetime.now(UTC))
    try:
        allowed = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return  # an absent extension allows every purpose
    for purpose in (_CLIENTS, _SERVERS) if serves else (_CLIENTS,):
        if purpose not in allowed:
            what = f"may not be used by {_PURPOSES[purpose]}: make one that may with `headway certs`"
            raise ConfigError(what, where)


def check_own_key(certificate: x509.Certificate, key: bytes, folder: Path) -> None:
    """Raise ConfigError, naming the file, unless a folder's key is that of its certificate."""
    try:
        found = load_pem_private_key(key, password=None)
    except (ValueError, TypeError) as error:
        raise ConfigError("is not a private key in PEM", str(folder / KEY_FILE)) from error
    if found.public_key() != certificate.public_key():
        raise ConfigError(f"is not the key of {CERTIFICATE_FILE}", str(folder / KEY_FILE))


def end_of(certificate: x509.Certificate, where: str, *, now: datetime) -> str:
    """Return a line about the end of a person's certificate, if that is near; empty: it is not, or a daemon renews it.

    Near means two weeks, or the last third of a short life.
    """
    if roles_among(names_in(certificate)) == {Role.NODE}:
        return ""
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if last - now > min(NEAR, (last - first) / 3):
        return ""
    return f"{where}: ends on {_date(last)}: `headway certs renew` gets the next one"


def why_no_operator(identity: TlsIdentity | None, folder: Path | None) -> str:
    """Return why this side may change nothing in its cluster, and what to do; empty: it may, or has no certificate."""
    if identity is None or folder is None:
        return ""
    where = folder / CERTIFICATE_FILE
    names = names_in(read_certificate(identity.certificate, str(where)))
    if Role.OPERATOR in roles_among(names):
        return ""
    told = "only an operator may change anything: `headway certs` makes a certificate of one with --operator"
    return f"{where}: is of {holder(names)}, and {told}"


def check_dates(certificate: x509.Certificate, where: str, *, now: datetime) -> None:
    """Raise ConfigError for a certificate that is not yet or no longer valid at `now`."""
    told = f"this machine's clock says {_date(now)}"
    if now < certificate.not_valid_before_utc:
        first = _date(certificate.not_valid_before_utc)
        raise ConfigError(f"is valid from {first} on, and {told}: set the clock, or make a new certificate", where)
    if now > certificate.not_valid_after_utc:
        last = _date(certificate.not_valid_after_utc)
        raise ConfigError(f"expired on {last}, and {told}: make a new certificate, or set the clock", where)


def _date(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"
