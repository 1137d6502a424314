"""gRPC's credentials of an identity, which may be renewed meanwhile: for each dial, and for each handshake."""

from typing import Protocol

import grpc

from headway.stages.sockets.tls_identity import TlsIdentity


class Identity(Protocol):
    """Whoever knows a process's identity: a TlsIdentity itself, or one that is renewed."""

    def now(self) -> TlsIdentity:
        """Return the identity that counts now; the same object until it is another one."""
        ...


def dialling(identity: Identity) -> grpc.ChannelCredentials:
    """Return what a channel needs that is opened now."""
    own = identity.now()
    return grpc.ssl_channel_credentials(own.ca, own.key or None, own.certificate or None)


def serving(identity: Identity) -> grpc.ServerCredentials:
    """Return what a server needs, which asks for a certificate of each client, and shows its newest one."""
    shown = identity.now()
    configuration = _configuration(shown)

    def newest() -> grpc.ServerCertificateConfiguration:
        nonlocal shown, configuration
        if (now := identity.now()) is not shown:
            shown, configuration = now, _configuration(now)
        return configuration

    return grpc.dynamic_ssl_server_credentials(configuration, newest, require_client_authentication=True)


def _configuration(own: TlsIdentity) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(own.key, own.certificate)], root_certificates=own.ca)
