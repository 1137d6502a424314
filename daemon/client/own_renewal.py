"""`headway certs renew`: a person's next certificate, from a daemon with the authority: same name, same role.

The folder's key and certificate are two files, and a process may die between them. The certificate goes first: then
the next key is still there, and another call puts it in its place.
"""

from pathlib import Path

from cryptography.hazmat.primitives import serialization

from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.errors import ConfigError
from headway.daemon.joining.renewals import asked_of_authority
from headway.daemon.joining.signing_request import NEXT_KEY, next_key, signing_request
from headway.daemon.rpc.certificates import issuer_of, names_in, own_names, write_private
from headway.daemon.rpc.own_certificate import read_certificate
from headway.stages.durable import make_durable
from headway.stages.errors import ProtocolError
from headway.stages.sockets.roles import Role, roles_among
from headway.stages.sockets.tls_identity import CERTIFICATE_FILE, KEY_FILE


def finish(folder: Path) -> None:
    """Put the next key in its place, if its certificate is already in its own. Raises OSError, ConfigError."""
    certificate = read_certificate((folder / CERTIFICATE_FILE).read_bytes(), str(folder / CERTIFICATE_FILE))
    try:
        key = serialization.load_pem_private_key((folder / NEXT_KEY).read_bytes(), password=None)
    except (OSError, ValueError, TypeError):
        return  # no attempt has come so far
    if key.public_key() == certificate.public_key():
        (folder / NEXT_KEY).replace(folder / KEY_FILE)


async def renew(session: ClusterSession) -> str:
    """Replace this person's certificate in its folder; return a sentence. Raises ConfigError, PeerError, StoreError."""
    identity, folder = session.identity, session.address.certificates
    if identity is None or folder is None or session.address.state_dir is not None:
        raise ConfigError("names the folder with the certificate that is to be renewed", "--certs")
    where = folder / CERTIFICATE_FILE
    present = read_certificate(identity.certificate, str(where))
    borne = names_in(present)
    if roles_among(borne) == {Role.NODE}:
        raise ConfigError("is a node's: its daemon, or relay with --etcd, renews it by itself", str(where))
    name = next(iter(own_names(borne)), "")
    view = await session.view()
    try:
        key = next_key(folder, identity.key)
        pem = await asked_of_authority(view.nodes.values(), identity, signing_request(name, key))
        renewed = read_certificate(pem.encode(), "the authority's answer")
        if issuer_of(renewed, identity.ca) is None:
            raise ConfigError("is of an authority that is not in ca.pem: copy that one here first", "its answer")
        if renewed.public_key() != key.public_key() or set(names_in(renewed)) != set(borne):
            raise ConfigError("is not for this key, name and role", "the authority's answer")
        part = folder / f"{CERTIFICATE_FILE}.part"
        write_private(part, pem.encode())
        for path in (part, folder / NEXT_KEY):
            make_durable(path)
        part.replace(where)
        finish(folder)
    except ProtocolError as error:
        raise ConfigError(error.reason, str(where)) from error
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", str(error.filename or folder)) from error
    return f"{where}: renewed, until {renewed.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
