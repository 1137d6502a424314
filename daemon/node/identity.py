"""Reads this node's identity towards etcd and its peers: certificates and password, checked before anything
is dialled.
"""

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from headway.daemon.errors import ConfigError
from headway.daemon.node.config import NodeConfig
from headway.daemon.rpc.certificates import LOCAL_HOSTS, names_in
from headway.daemon.rpc.own_certificate import check_own_certificate, read_certificate
from headway.stages.sockets.roles import Role, holder, roles_among, without_roles
from headway.stages.sockets.tls_identity import CA_FILE, CERTIFICATE_FILE, KEY_FILE, TlsIdentity, is_borne


def read_identity(config: NodeConfig) -> tuple[TlsIdentity, str]:
    """Return the identity and etcd's password (empty without a user). Raises ConfigError, naming the file."""
    directory = config.certificates
    try:
        identity = TlsIdentity.read(directory)
    except OSError as error:
        where = str(error.filename or directory)
        raise ConfigError(
            f"cannot be read: {error.strerror}; certificates must name a folder that contains it", where
        ) from error
    authority = read_certificate(identity.ca, str(directory / CA_FILE))
    certificate = read_certificate(identity.certificate, str(directory / CERTIFICATE_FILE))
    try:
        key = load_pem_private_key(identity.key, password=None)
    except (ValueError, TypeError) as error:
        raise ConfigError("is not a private key in PEM", str(directory / KEY_FILE)) from error
    if key.public_key() != certificate.public_key():
        raise ConfigError(f"is not the key of {CERTIFICATE_FILE}", str(directory / KEY_FILE))
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature) as error:
        raise ConfigError(f"was not issued by the authority in {CA_FILE}", str(directory / CERTIFICATE_FILE)) from error
    check_own_certificate(certificate, str(directory / CERTIFICATE_FILE), serves=True)
    _check_name(config, certificate)
    return identity, _password(config)


def _check_name(config: NodeConfig, certificate: x509.Certificate) -> None:
    """Raise ConfigError unless the certificate is this node's: peers would take it for another's."""
    if config.name in LOCAL_HOSTS:
        raise ConfigError(f"{config.name!r} is every machine's name: give the node its own name", "name")
    names = names_in(certificate)
    where = str(config.certificates / CERTIFICATE_FILE)
    if Role.NODE not in roles_among(names):
        raise ConfigError(f"is of {holder(names)}, and a daemon needs a node's: `headway certs` makes one", where)
    if not is_borne(config.name, names):
        told = ", ".join(without_roles(names)) or "no name"
        what = f"bears {told}, and not this node's name {config.name}: `headway certs` makes one that does"
        raise ConfigError(what, where)


def _password(config: NodeConfig) -> str:
    if config.etcd_password_file is None:
        return ""
    try:
        return config.etcd_password_file.read_text(encoding="utf-8").rstrip("\n")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", str(config.etcd_password_file)) from error
