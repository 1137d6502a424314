"""A new machine's own key, and its request for a certificate: PKCS #10 (RFC 2986)."""

from contextlib import suppress
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from headway.daemon.net.certificates import key_pem, make_private_directory, write_private
from headway.daemon.net.invitation import RefusedError
from headway.stages.durable import make_durable

NEXT_KEY: Final = "next-key.pem"
"""Key of an attempt that has not ended, in its holder's folder: if the answer is lost, the same key asks again."""


def new_key() -> ec.EllipticCurvePrivateKey:
    """Return a key that never leaves this machine."""
    return ec.generate_private_key(ec.SECP256R1())


def next_key(folder: Path, present: bytes) -> ec.EllipticCurvePrivateKey:
    """Return the key of an attempt that has not counted yet, or a new one, which the next attempt finds in the folder.

    present: the key that counts now, in PEM.
    """
    make_private_directory(folder)
    path = folder / NEXT_KEY
    with suppress(OSError, ValueError, TypeError):
        pem = path.read_bytes()
        key = serialization.load_pem_private_key(pem, password=None)
        if isinstance(key, ec.EllipticCurvePrivateKey) and pem != present:
            return key
    key = new_key()
    write_private(path, key_pem(key))
    make_durable(path)  # the authority gives a certificate to this key alone
    make_durable(folder)
    return key


def signing_request(name: str, key: ec.EllipticCurvePrivateKey) -> str:
    """Return a request for a name in PEM, signed with the key."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    names = x509.SubjectAlternativeName([x509.DNSName(name)])
    builder = x509.CertificateSigningRequestBuilder().subject_name(subject).add_extension(names, critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()


def read_signing_request(pem: str) -> tuple[ec.EllipticCurvePublicKey, tuple[str, ...]]:
    """Return the key, and every name that is asked for. Raises RefusedError for what the authority does not sign."""
    try:
        request = x509.load_pem_x509_csr(pem.encode())
        key, is_own = request.public_key(), request.is_signature_valid
        common = [str(value.value) for value in request.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        extensions = request.extensions
        others = [one for one in extensions if not isinstance(one.value, x509.SubjectAlternativeName)]
        names = [
            str(one.value)
            for each in extensions
            if isinstance(each.value, x509.SubjectAlternativeName)
            for one in each.value
        ]
    except Exception as error:
        # The library raises errors of many kinds for bytes that strangers send.
        raise RefusedError("the request cannot be read") from error
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1) or not is_own:
        raise RefusedError("the request is not signed with its own key on the curve P-256")
    if others:
        raise RefusedError(f"the request asks for more than names: {others[0].oid.dotted_string}")
    return key, (*(name for name in common if len(name) < 64), *names)
