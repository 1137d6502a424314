"""An operator's signature under a submission. Every node can write to etcd, and no node can submit a job by that.

The signature is the last field of the record. It covers all bytes before it, as they lie in etcd, so that a release
need not write a record as another one did. It is ECDSA (FIPS 186-5) or RSASSA-PKCS1-v1_5 (RFC 8017), with SHA-256.
"""

import base64
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa
from cryptography.x509.verification import Criticality, ExtensionPolicy, PolicyBuilder, Store, VerificationError

from headway.daemon.errors import ConfigError
from headway.daemon.records.format import encode
from headway.daemon.records.records import SpecRecord
from headway.daemon.records.signature import Signature
from headway.daemon.rpc.certificates import names_in
from headway.stages.sockets.credentials import Identity
from headway.stages.sockets.roles import Role, holder, roles_among, without_roles
from headway.stages.sockets.tls_identity import TlsIdentity

PURPOSE: Final = b"headway submission\n"
"""Goes before the signed bytes, so that no signature of another kind fits."""
MAX_SIGNER_BYTES: Final = 32 << 10
_SEPARATOR: Final = b',"signature":"'
_END: Final = b'"}'


def signature_check(identity: Identity | None) -> Callable[[bytes, SpecRecord], Signature] | None:
    """Return how a node with this certificate judges submissions, by the authorities that it trusts at that moment.

    None: it takes anybody's, as its authority knows of no roles.
    """
    if identity is None:
        return None
    roles = roles_among(names_in(x509.load_pem_x509_certificate(identity.now().certificate)))
    if Role.OPERATOR in roles:
        return None
    return lambda raw, record: judge(raw, record, ca=identity.now().ca)


def signed(record: SpecRecord, identity: TlsIdentity | None) -> bytes:
    """Return a submission as it goes to etcd, signed if there is a key. Raises ConfigError for an odd kind of key."""
    if identity is None:
        return encode(record)
    signer = identity.certificate.decode()
    return _with_signature(
        encode(replace(record, signed_by=_own_name(identity), signer=signer, signature="")), identity
    )


def signed_again(raw: bytes, identity: TlsIdentity, *, now: float) -> bytes:
    """Return a submission as it lies in etcd, with another signature. Raises ConfigError, as `signed`.

    The bytes may have fields of a later release, which stay. Only who signed it, and when, is another.
    """
    fields = msgspec.json.decode(raw)
    signature = {"signed_at": now, "signed_by": _own_name(identity), "signer": identity.certificate.decode()}
    for name in (*signature, "signature"):
        fields.pop(name, None)
    return _with_signature(msgspec.json.encode({**fields, **signature, "signature": ""}), identity)


def _own_name(identity: TlsIdentity) -> str:
    return next(iter(without_roles(names_in(x509.load_pem_x509_certificate(identity.certificate)))), "")


def _with_signature(raw: bytes, identity: TlsIdentity) -> bytes:
    """Return a record whose last field, the signature, is empty, with one."""
    head, _, _ = raw.rpartition(_SEPARATOR)
    key = serialization.load_pem_private_key(identity.key, password=None)
    if isinstance(key, ec.EllipticCurvePrivateKey):
        signature = key.sign(PURPOSE + head, ec.ECDSA(hashes.SHA256()))
    elif isinstance(key, rsa.RSAPrivateKey):
        signature = key.sign(PURPOSE + head, padding.PKCS1v15(), hashes.SHA256())
    else:
        raise ConfigError("signs jobs only if it is elliptic or of RSA", "the certificate's key")
    return head + _SEPARATOR + base64.b64encode(signature) + _END


def judge(raw: bytes, record: SpecRecord, *, ca: bytes) -> Signature:
    """Return whether a submission is an operator's own words, and every name of the operator.

    raw: the record as it lies in etcd. ca: the authorities' certificates in PEM.
    """
    if not record.signer or not record.signature:
        return Signature("no operator has signed it: submit it with an operator's certificate")
    head, _, tail = raw.rpartition(_SEPARATOR)
    if tail != record.signature.encode() + _END or len(record.signer) > MAX_SIGNER_BYTES:
        return Signature("its signature cannot be read")
    try:
        leaf, *others = x509.load_pem_x509_certificates(record.signer.encode())
        names, who, key = names_in(leaf), holder(names_in(leaf)), leaf.public_key()
        at = datetime.fromtimestamp(record.signed_at or record.submitted_at, UTC)
        # Extensions are not judged here, except that only an authority signs certificates: TLS judges them.
        ends = ExtensionPolicy.permit_all()
        middle = ends.require_present(x509.BasicConstraints, Criticality.AGNOSTIC, None)
        policy = PolicyBuilder().store(Store(x509.load_pem_x509_certificates(ca))).time(at)
        verifier = policy.extension_policies(ca_policy=middle, ee_policy=ends).build_client_verifier()
        verifier.verify(leaf, others)
    except VerificationError:
        told = "its signer's certificate is not of this cluster's authority, or was not valid when it was signed"
        return Signature(told)
    except Exception:  # anybody may have written it, and the library raises errors of many kinds
        return Signature("its signer's certificate cannot be read")
    if record.signed_by not in names:
        return Signature(f"{who} has signed it as {record.signed_by[:60]!r}")
    if Role.OPERATOR not in roles_among(names):
        return Signature(f"{who} has signed it, and only an operator submits jobs")
    if not _is_signed_with(key, record.signature, PURPOSE + head):
        return Signature(f"it is not what {who} has signed")
    # The operator chooses among the names which one to sign as, so all of them are asked for.
    return Signature(names=frozenset(name.casefold() for name in names))


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
