"""gRPC's credentials of an identity, which may be renewed meanwhile: for each dial, and for each handshake."""

import threading
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
    """Return what one port of a server needs, which asks for a certificate of each client, and shows its newest one."""
    shown = identity.now()
    changing = threading.Lock()

    def newest() -> grpc.ServerCertificateConfiguration | None:
        """Return another configuration once, after a renewal. For any other answer than None gRPC frees the present one
        at once, also under the handshakes that use it in its other threads.
        """
        nonlocal shown
        with changing:
            if (now := identity.now()) is shown:
                return None
            shown = now
            return _configuration(now)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(shown),
        newest,  # type: ignore[arg-type]  # the stubs do not know of None
        require_client_authentication=True,
    )


def _configuration(own: TlsIdentity) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(own.key, own.certificate)], root_certificates=own.ca)
