"""A server shows its newest certificate at each handshake, and a dial presents its own newest one."""

import asyncio
import socket
import ssl
from datetime import timedelta
from pathlib import Path

import grpc
import grpc.aio
from cryptography import x509

from headway.daemon.net.certificates import CertificateAuthority
from headway.daemon.net.renewals import keep_renewed
from headway.stages.sockets.tls_identity import RenewableIdentity, TlsIdentity, certificate_of_client, dialling, serving


def serial(pem: bytes) -> int:
    """Serial number of a certificate."""
    return x509.load_pem_x509_certificate(pem).serial_number


def shown(port: int, client: Path) -> int:
    """Serial number of the certificate that a server shows in a new handshake."""
    context = ssl.create_default_context(cafile=client / "ca.pem")
    context.load_cert_chain(client / "cert.pem", client / "key.pem")
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10.0) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        der = connection.getpeercert(binary_form=True)
    assert der is not None
    return x509.load_der_x509_certificate(der).serial_number


async def test_both_sides_show_what_was_renewed_meanwhile(tmp_path: Path) -> None:
    """Two renewals: each handshake after one has its certificate, on the listening and on the dialling side."""
    authority = CertificateAuthority.create(tmp_path / "ca")
    me, folder = authority.issue("me"), tmp_path / "renewals"
    identity = RenewableIdentity(authority.issue("node"), folder)

    async def answer(_: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        return str(serial(certificate_of_client(context.auth_context()))).encode()

    server = grpc.aio.server()
    methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {"m": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("s", methods),))
    port = server.add_secure_port("127.0.0.1:0", serving(identity))
    await server.start()
    try:
        for name in ("", "A", "B"):
            if name:
                scratch = authority.issuing_into(tmp_path / name).issue("node", validity=timedelta(hours=1))
                pair = TlsIdentity.read(scratch)
                keep_renewed(folder, pair.certificate, pair.key, name=name)
            expected = serial(identity.now().certificate)
            assert await asyncio.to_thread(shown, port, me) == expected
            async with grpc.aio.secure_channel(f"localhost:{port}", dialling(identity)) as channel:
                call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/s/m")
                assert await call(b"", timeout=10.0) == str(expected).encode()
    finally:
        await server.stop(None)
