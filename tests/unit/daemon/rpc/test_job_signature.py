"""An operator's signature under a submission, as it lies in etcd."""

import base64
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

from headway.daemon.jobs.job import JobSection, JobSpec, QueueSpec
from headway.daemon.records.certificate_records import RevokedRecord
from headway.daemon.records.format import decode, encode
from headway.daemon.records.keys import Keys
from headway.daemon.records.records import SpecRecord
from headway.daemon.rpc.certificates import CertificateAuthority, certificate_pem
from headway.daemon.rpc.job_signature import judge, signature_check, signed, signed_again
from headway.daemon.view.cluster_view import ClusterView
from headway.stages.sockets.roles import ROLE_URI, Role
from headway.stages.sockets.tls_identity import TlsIdentity

NOW = datetime.now(UTC).timestamp()
RECORD = SpecRecord(spec=JobSpec(job=JobSection(name="demo")), uid="01", submitted_at=NOW, submitted_by="me@here")


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    """An authority of its own."""
    return CertificateAuthority.create(tmp_path / "ca")


def identity_of(authority: CertificateAuthority, role: Role | None, name: str = "me") -> TlsIdentity:
    """Return the identity of somebody with a role."""
    return TlsIdentity.read(authority.issue(name, role=role))


def judged(raw: bytes, identity: TlsIdentity) -> str:
    """Return how a node with the same authority judges the bytes."""
    return judge(raw, decode(raw, SpecRecord), ca=identity.ca).fault


@pytest.mark.parametrize("role", [Role.OPERATOR, None])
def test_what_an_operator_submits_is_taken(authority: CertificateAuthority, role: Role | None) -> None:
    """Also from a certificate of old, and every other field is as it was."""
    identity = identity_of(authority, role)
    raw = signed(RECORD, identity)
    assert judged(raw, identity) == ""
    assert replace(decode(raw, SpecRecord), signed_by="", signer="", signature="") == RECORD


def test_a_later_release_may_write_more_fields(authority: CertificateAuthority) -> None:
    """The bytes count, so a field that this release does not know is covered too."""
    identity = identity_of(authority, Role.OPERATOR)
    later = json.loads(encode(replace(RECORD, signed_by="me", signer=identity.certificate.decode())))
    raw = json.dumps({"format": 1, "novelty": 3, **later}, separators=(",", ":")).encode()
    key = serialization.load_pem_private_key(identity.key, password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    head = raw.rpartition(b',"signature":"')[0]
    signature = base64.b64encode(key.sign(b"headway submission\n" + head, ec.ECDSA(hashes.SHA256())))
    raw = head + b',"signature":"' + signature + b'"}'
    assert judged(raw, identity) == ""
    assert judged(raw.replace(b'"novelty":3', b'"novelty":4'), identity) == "it is not what me (operator) has signed"


def test_nobody_else_submits(authority: CertificateAuthority, tmp_path: Path) -> None:
    """A node, a reader, somebody of another authority, and nobody."""
    mine = identity_of(authority, Role.OPERATOR)
    for role in (Role.NODE, Role.READER):
        told = judged(signed(RECORD, identity_of(authority, role, "b")), mine)
        assert told == f"b ({role}) has signed it, and only an operator submits jobs"
    stranger = identity_of(CertificateAuthority.create(tmp_path / "other"), Role.OPERATOR)
    assert "is not of this cluster's authority" in judged(signed(RECORD, stranger), mine)
    assert judged(encode(RECORD), mine) == "no operator has signed it: submit it with an operator's certificate"


def test_a_node_cannot_make_an_operator(authority: CertificateAuthority) -> None:
    """A certificate that a node's key has signed is of no authority, whoever stands in it."""
    node = identity_of(authority, Role.NODE, "b")
    node_key = serialization.load_pem_private_key(node.key, password=None)
    assert isinstance(node_key, ec.EllipticCurvePrivateKey)
    its_own = x509.load_pem_x509_certificate(node.certificate)
    key = ec.generate_private_key(ec.SECP256R1())
    forged = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "me")]))
        .issuer_name(its_own.subject)
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(datetime.now(UTC) - timedelta(hours=1))
        .not_valid_after(datetime.now(UTC) + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"{ROLE_URI}operator")]), False)
        .sign(node_key, hashes.SHA256())
    )
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    forger = TlsIdentity(node.ca, certificate_pem(forged) + node.certificate, pem)
    assert "is not of this cluster's authority" in judged(signed(RECORD, forger), node)


def test_a_certificate_counts_at_the_time_of_the_submission(authority: CertificateAuthority) -> None:
    """A job outlives its operator's certificate; one that was submitted after the end is refused."""
    folder = authority.issue("me", role=Role.OPERATOR, validity=timedelta(hours=1))
    identity = TlsIdentity.read(folder)
    assert judged(signed(RECORD, identity), identity) == ""
    for later in (7200.0, -7200.0, 1e300):
        assert judged(signed(replace(RECORD, submitted_at=NOW + later), identity), identity)


def test_an_authority_of_another_make_may_use_rsa(authority: CertificateAuthority) -> None:
    """Its keys sign jobs as well."""
    mine = identity_of(authority, Role.OPERATOR)
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    certificate = authority.certify(key.public_key(), "me", role=Role.OPERATOR)  # type: ignore[arg-type]
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    raw = signed(RECORD, TlsIdentity(mine.ca, certificate_pem(certificate), pem))
    assert judged(raw, mine) == ""
    assert judged(raw.replace(b"me@here", b"us@here"), mine) == "it is not what me (operator) has signed"


def test_a_changed_or_crafted_record_is_refused(authority: CertificateAuthority) -> None:
    """Any other byte, a second spec behind the signature, another signature, no base64, a certificate of garbage."""
    identity = identity_of(authority, Role.OPERATOR)
    raw = signed(RECORD, identity)
    signature = decode(raw, SpecRecord).signature
    crafted = [
        raw.replace(b'"uid":"01"', b'"uid":"02"'),
        raw.removesuffix(b"}") + b',"uid":"02"}',
        raw.removesuffix(b"}") + b',"signature":"' + signature.encode() + b'"}',
        raw.replace(signature.encode(), signature[::-1].encode()),
        raw.replace(signature.encode(), b"%%%"),
        signed(replace(RECORD, signed_by="other"), identity).replace(b'"signed_by":"me"', b'"signed_by":"other"'),
        encode(replace(RECORD, signer="x", signature=signature)),
        encode(replace(RECORD, signer="x" * 100_000, signature=signature)),
    ]
    assert all(judged(each, identity) for each in crafted)


def test_who_asks_for_signatures(authority: CertificateAuthority) -> None:
    """A node whose certificate says so; no node of an authority that knows of no roles, nor one without TLS."""
    assert signature_check(None) is None
    assert signature_check(identity_of(authority, None)) is None
    assert signature_check(identity_of(authority, Role.NODE, "b")) is not None
    assert signed(RECORD, None) == encode(RECORD)


def test_a_view_refuses_what_no_operator_has_signed(authority: CertificateAuthority) -> None:
    """The job comes in as one of default sizes, with the reason; one that is rewritten loses its spec too."""
    me, node = identity_of(authority, Role.OPERATOR), identity_of(authority, Role.NODE, "b")
    own = replace(RECORD, spec=replace(RECORD.spec, queue=QueueSpec(priority=3)))
    view = ClusterView(judge_signature=signature_check(node))
    key = Keys.of("demo", "spec")
    view.apply(key, signed(own, me), mod_revision=1, create_revision=1)
    assert (view.jobs["demo"].refusal, view.jobs["demo"].spec) == ("", own.spec)
    view.apply(key, signed(own, node), mod_revision=2, create_revision=1)
    assert view.jobs["demo"].refusal == "b (node) has signed it, and only an operator submits jobs"
    assert view.jobs["demo"].spec == JobSpec(job=JobSection(name="demo"))


def test_a_revoked_operator_has_no_other_name_to_sign_with(authority: CertificateAuthority) -> None:
    """A certificate bears several names, and its holder chooses one to sign as: revoked is who bears a revoked one."""
    mine, node = identity_of(authority, Role.OPERATOR), identity_of(authority, Role.NODE, "b")
    own_names = signed(RECORD, mine)
    key = serialization.load_pem_private_key(mine.key, password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    head = own_names.replace(b'"signed_by":"me"', b'"signed_by":"localhost"').rpartition(b',"signature":"')[0]
    signature = base64.b64encode(key.sign(b"headway submission\n" + head, ec.ECDSA(hashes.SHA256())))
    raw = head + b',"signature":"' + signature + b'"}'
    assert judged(raw, node) == ""
    view = ClusterView(judge_signature=signature_check(node))
    view.apply(Keys.of("demo", "spec"), raw, mod_revision=1, create_revision=1)
    before = view.jobs["demo"].refusal
    assert not before
    revoked = encode(RevokedRecord(name="me", revoked_at=NOW))
    view.apply(Keys.revoked("me"), revoked, mod_revision=2, create_revision=2)
    view.apply(Keys.of("demo", "spec"), raw, mod_revision=3, create_revision=3)
    after = view.jobs["demo"].refusal
    assert after == "me had been revoked when it was submitted"


def test_a_signed_submission_counts_under_its_own_name_alone(authority: CertificateAuthority) -> None:
    """A node copies an operator's words to another job's key: it is refused there, and the job itself is as it was."""
    me, node = identity_of(authority, Role.OPERATOR), identity_of(authority, Role.NODE, "b")
    view = ClusterView(judge_signature=signature_check(node))
    for name in ("demo", "other"):
        view.apply(Keys.of(name, "spec"), signed(RECORD, me), mod_revision=1, create_revision=1)
    assert view.jobs["other"].refusal == "job.name: 'demo' lies under the name 'other'"
    assert not view.jobs["demo"].refusal


def test_a_job_of_a_month_ago_is_signed_again_by_an_operator_of_today(
    authority: CertificateAuthority, tmp_path: Path
) -> None:
    """The next authority believes the new signature alone. Only who signed, and when, is another, word for word."""
    month = 30 * 86400.0
    old = identity_of(authority, Role.OPERATOR)
    later = json.loads(signed(replace(RECORD, submitted_at=NOW - month), old))
    raw = json.dumps({"format": 1, "novelty": 1.5, **later}, separators=(",", ":")).encode()
    new = identity_of(CertificateAuthority.create(tmp_path / "next"), Role.OPERATOR, "ann")
    again = signed_again(raw, new, now=NOW)
    assert "is not of this cluster's authority" in judged(raw, new)
    assert judged(again, new) == ""
    assert judged(again.replace(b'"novelty":1.5', b'"novelty":2.5'), new) == "it is not what ann (operator) has signed"
    signature = ("signed_at", "signed_by", "signer", "signature")
    assert {key: value for key, value in json.loads(again).items() if key not in signature} == {
        key: value for key, value in json.loads(raw).items() if key not in signature
    }
    found = decode(again, SpecRecord)
    assert (found.signed_by, found.signed_at, found.submitted_at) == ("ann", NOW, NOW - month)
    assert signed_again(again, new, now=NOW + 1.0).count(b'"signer"') == 1
