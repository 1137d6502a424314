"""Reads this node's identity towards etcd and its peers: certificates and password, checked before anything
is dialled.
"""

import socket
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509

from headway.daemon.base.addresses import LOCAL_HOSTS
from headway.daemon.base.errors import ConfigError
from headway.daemon.net.certificates import (
    check_own_certificate,
    check_own_key,
    issuer_of,
    names_in,
    own_names,
    read_certificate,
)
from headway.daemon.net.renewals import forget_renewed
from headway.daemon.node.settings import NodeConfig
from headway.stages.sockets.roles import Role, holder, roles_among, without_roles
from headway.stages.sockets.tls_identity import (
    CA_FILE,
    CERTIFICATE_FILE,
    KEY_FILE,
    NEWEST,
    RenewableIdentity,
    TlsIdentity,
    is_borne,
)


def read_identity(config: NodeConfig) -> tuple[RenewableIdentity, str]:
    """Return the identity and etcd's password (empty without a user). Raises ConfigError, naming the file."""
    identity = open_identity(config.certificates, config.renewals_dir)
    _check_name(config, identity.now())
    return identity, _password(config)


def open_identity(certificates: Path, renewals: Path) -> RenewableIdentity:
    """Return the identity of a folder and its renewals, which peers take now. Raises ConfigError, naming the file.

    A renewed certificate counts until the folder has a newer one, or its ca.pem no longer that authority.
    """
    try:
        named = TlsIdentity.read(certificates)
        if (renewed := _renewed(certificates, renewals)) is not None and not _follows(renewed, named):
            forget_renewed(renewals)
        identity = RenewableIdentity(certificates, renewals)
    except OSError as error:
        where = str(error.filename or certificates)
        raise ConfigError(
            f"cannot be read: {error.strerror}; certificates must name a folder that contains it", where
        ) from error
    _check(identity.now(), certificates if identity.now().key == named.key else renewals / NEWEST)
    return identity


def _renewed(certificates: Path, renewals: Path) -> TlsIdentity | None:
    """Return the pair that was renewed last; None: there is none."""
    ca, newest = certificates / CA_FILE, renewals / NEWEST
    try:
        return TlsIdentity(ca.read_bytes(), *((newest / name).read_bytes() for name in (CERTIFICATE_FILE, KEY_FILE)))
    except FileNotFoundError:
        return None


def _follows(renewed: TlsIdentity, named: TlsIdentity) -> bool:
    """Return whether a renewed certificate is the named one's: of its authority, no older, and of its name.

    A state folder that was copied from another node has that node's renewals.
    """
    try:
        found, first = (x509.load_pem_x509_certificate(each.certificate) for each in (renewed, named))
    except ValueError:
        return False
    name, its_name = (own_names(names_in(each))[:1] for each in (first, found))
    is_newer = found.not_valid_before_utc >= first.not_valid_before_utc
    return is_newer and name == its_name and issuer_of(found, renewed.ca) is not None


def _check(identity: TlsIdentity, directory: Path) -> None:
    """Raise ConfigError, naming the file, unless peers take this certificate."""
    read_certificate(identity.ca, str(directory / CA_FILE))
    certificate = read_certificate(identity.certificate, str(directory / CERTIFICATE_FILE))
    check_own_key(certificate, identity.key, directory)
    if issuer_of(certificate, identity.ca) is None:
        raise ConfigError(f"was not issued by the authority in {CA_FILE}", str(directory / CERTIFICATE_FILE))
    check_own_certificate(certificate, str(directory / CERTIFICATE_FILE), serves=True)


def _check_name(config: NodeConfig, identity: TlsIdentity) -> None:
    """Raise ConfigError unless the certificate is this node's: peers would take it for another's."""
    if config.name in LOCAL_HOSTS:
        raise ConfigError(f"{config.name!r} is every machine's name: give the node its own name", "name")
    names = names_in(x509.load_pem_x509_certificate(identity.certificate))
    where = str(config.certificates / CERTIFICATE_FILE)
    check_is_node(names, where, who="a daemon")
    if not is_borne(config.name, names):
        told = ", ".join(without_roles(names)) or "no name"
        what = f"bears {told}, and not this node's name {config.name}: `headway certs` makes one that does"
        if config.name == socket.gethostname() and (own := own_names(names)):
            what += f", or --name {own[0]} keeps the node of a machine that was renamed"
        raise ConfigError(what, where)


def check_is_node(names: Iterable[str], where: str, *, who: str) -> None:
    """Raise ConfigError, naming the file, unless a certificate with these names is a node's. who: the one it is for."""
    names = tuple(names)
    if Role.NODE not in roles_among(names):
        raise ConfigError(f"is of {holder(names)}, and {who} needs a node's: `headway certs` makes one", where)


def _password(config: NodeConfig) -> str:
    if config.etcd_password_file is None:
        return ""
    try:
        return config.etcd_password_file.read_text(encoding="utf-8").rstrip("\n")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", str(config.etcd_password_file)) from error
