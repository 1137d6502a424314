"""An operator's signature under a submission. Every node can write to etcd, and no node can submit a job by that.

The signature is the last field of the record. It covers all bytes before it, as they lie in etcd, so that a release
need not write a record as another one did. It is ECDSA (FIPS 186-5) or RSASSA-PKCS1-v1_5 (RFC 8017), with SHA-256.
"""

import base64
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.x509.verification import Criticality, ExtensionPolicy, PolicyBuilder, Store, VerificationError

from headway.daemon.errors import ConfigError
from headway.daemon.records.format import encode
from headway.daemon.records.records import SpecRecord
from headway.daemon.rpc.certificates import names_in
from headway.stages.sockets.roles import Role, holder, roles_among, without_roles
from headway.stages.sockets.tls_identity import TlsIdentity

PURPOSE: Final = b"headway submission\n"
"""Goes before the signed bytes, so that no signature of another kind fits."""
MAX_SIGNER_BYTES: Final = 32 << 10
_SEPARATOR: Final = b',"signature":"'
_END: Final = b'"}'


def signature_check(identity: TlsIdentity | None) -> Callable[[bytes, SpecRecord], str] | None:
    """Return how a node with this certificate judges submissions. None: it takes anybody's, as its authority knows of
    no roles.
    """
    if identity is None:
        return None
    roles = roles_among(names_in(x509.load_pem_x509_certificate(identity.certificate)))
    return partial(why_unsigned, ca=identity.ca) if Role.OPERATOR not in roles else None


def signed(record: SpecRecord, identity: TlsIdentity | None) -> bytes:
    """Return a submission as it goes to etcd, signed if there is a key. Raises ConfigError for an odd kind of key."""
    if identity is None:
        return encode(record)
    names = without_roles(names_in(x509.load_pem_x509_certificate(identity.certificate)))
    told = replace(record, signed_by=next(iter(names), ""), signer=identity.certificate.decode(), signature="")
    raw = encode(told)
    head, _, _ = raw.rpartition(_SEPARATOR)
    key = serialization.load_pem_private_key(identity.key, password=None)
    if isinstance(key, ec.EllipticCurvePrivateKey):
        signature = key.sign(PURPOSE + head, ec.ECDSA(hashes.SHA256()))
    elif isinstance(key, rsa.RSAPrivateKey):
        signature = key.sign(PURPOSE + head, padding.PKCS1v15(), hashes.SHA256())
    else:
        raise ConfigError("signs jobs only if it is elliptic or of RSA", "the certificate's key")
    return head + _SEPARATOR + base64.b64encode(signature) + _END


def why_unsigned(raw: bytes, record: SpecRecord, *, ca: bytes) -> str:
    """Return why a submission is not an operator's own words, as a sentence's end; empty: it is.

    raw: the record as it lies in etcd. ca: the authorities' certificates in PEM.
    """
    if not record.signer or not record.signature:
        return "no operator has signed it: submit it with an operator's certificate"
    head, _, tail = raw.rpartition(_SEPARATOR)
    if tail != record.signature.encode() + _END or len(record.signer) > MAX_SIGNER_BYTES:
        return "its signature cannot be read"
    try:
        leaf, *others = x509.load_pem_x509_certificates(record.signer.encode())
        who = holder(names_in(leaf))
        at = datetime.fromtimestamp(record.submitted_at, UTC)
        # Extensions are not judged here, except that only an authority signs certificates: TLS judges them.
        ends = ExtensionPolicy.permit_all()
        middle = ends.require_present(x509.BasicConstraints, Criticality.AGNOSTIC, None)
        policy = PolicyBuilder().store(Store(x509.load_pem_x509_certificates(ca))).time(at)
        verifier = policy.extension_policies(ca_policy=middle, ee_policy=ends).build_client_verifier()
        verifier.verify(leaf, others)
    except VerificationError:
        return "its signer's certificate is not of this cluster's authority, or was not valid when it was submitted"
    except Exception:  # anybody may have written it, and the library raises errors of many kinds
        return "its signer's certificate cannot be read"
    if record.signed_by not in names_in(leaf):
        return f"{who} has signed it as {record.signed_by[:60]!r}"
    if Role.OPERATOR not in roles_among(names_in(leaf)):
        return f"{who} has signed it, and only an operator submits jobs"
    is_whole = _is_signed_with(leaf.public_key(), record.signature, PURPOSE + head)
    return "" if is_whole else f"it is not what {who} has signed"


def _is_signed_with(key: object, signature: str, message: bytes) -> bool:
    try:
        told = base64.b64decode(signature, validate=True)
        if isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(told, message, ec.ECDSA(hashes.SHA256()))
        elif isinstance(key, rsa.RSAPublicKey):
            key.verify(told, message, padding.PKCS1v15(), hashes.SHA256())
        else:
            return False
    except (InvalidSignature, ValueError):
        return False
    return True
