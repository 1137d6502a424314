"""The authority in a folder and what it issues; another authority that follows it."""

import shutil
import ssl
import stat
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID

from headway.daemon.base.errors import ConfigError
from headway.daemon.cli.program import run
from headway.daemon.net import certificates
from headway.daemon.net.certificates import CertificateAuthority, issuer_of, read_certificate
from headway.stages.sockets.roles import Role
from headway.stages.sockets.tls_identity import TlsIdentity
from tests.rigs.mortal_work import dies_at


def certificate(folder: Path) -> x509.Certificate:
    """The certificate in a folder that `issue` made."""
    return x509.load_pem_x509_certificate(TlsIdentity.read(folder).certificate)


def mode(path: Path) -> int:
    """Permission bits."""
    return stat.S_IMODE(path.stat().st_mode)


def test_a_certificate_bears_every_name_it_may_be_called_by(tmp_path: Path) -> None:
    """Its own name, its hosts and the loopback: names as names, addresses as addresses, none twice."""
    folder = CertificateAuthority.create(tmp_path / "ca").issue("node-1", hosts=["a.example", "10.0.0.7", "node-1"])
    names = certificate(folder).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["node-1", "a.example", "localhost"]
    addresses = [ip_address("10.0.0.7"), ip_address("127.0.0.1"), ip_address("::1")]
    assert names.get_values_for_type(x509.IPAddress) == addresses


def test_a_certificate_serves_both_ends_and_signs_nothing(tmp_path: Path) -> None:
    """Every process is server and client; none is an authority. It is verified by the authority's own key."""
    authority = CertificateAuthority.create(tmp_path / "ca")
    signed = certificate(authority.issue("node-1"))
    purposes = signed.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(purposes) == {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH}
    assert signed.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
    signed.verify_directly_issued_by(x509.load_pem_x509_certificate((tmp_path / "ca" / "ca.pem").read_bytes()))


def test_a_certificate_is_valid_now_and_not_longer_than_its_authority(tmp_path: Path) -> None:
    """An authority of two hours: valid a little before now (clocks differ), over in two hours."""
    signed = certificate(CertificateAuthority.create(tmp_path / "ca", validity=timedelta(hours=2)).issue("n"))
    now = datetime.now(UTC)
    assert signed.not_valid_before_utc < now - timedelta(minutes=30)
    assert now < signed.not_valid_after_utc <= now + timedelta(hours=2)


def test_nobody_else_can_read_a_key(tmp_path: Path) -> None:
    """Folders 0700 and keys 0600, under whatever umask."""
    authority = CertificateAuthority.create(tmp_path / "ca")
    folder = authority.issue("n")
    assert (mode(authority.directory), mode(folder)) == (0o700, 0o700)
    assert (mode(authority.directory / "ca-key.pem"), mode(folder / "key.pem")) == (0o600, 0o600)


def test_an_authority_is_never_overwritten(tmp_path: Path) -> None:
    """A second `create` in the folder would orphan every certificate: refused, naming the folder."""
    CertificateAuthority.create(tmp_path / "ca")
    with pytest.raises(ConfigError, match="already"):
        CertificateAuthority.create(tmp_path / "ca")


def test_certificates_whose_making_was_killed_at_any_write_are_made_again(tmp_path: Path) -> None:
    """By the same command, which makes the authority anew only if nothing can have been signed with its key."""
    folder, number = tmp_path / "ca", 0

    def make() -> None:
        assert run(["certs", str(folder), "n=10.0.0.7", "--operator", "me"]) == 0

    while dies_at(number, make):
        has_signed = (folder / "n").exists()
        before = CertificateAuthority.open(folder).certificate if has_signed else None
        make()
        authority = CertificateAuthority.open(folder)
        assert before in (None, authority.certificate)
        for name in ("n", "me"):
            assert issuer_of(certificate(folder / name), authority.trusted) == authority.certificate
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(
                folder / name / "cert.pem", folder / name / "key.pem"
            )
        shutil.rmtree(folder)
        number += 1
    assert number > 10


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../ca", "a:7070", "localhost"])
def test_a_name_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    """A node's name becomes a folder, and one that others bear too proves nothing: ConfigError."""
    authority = CertificateAuthority.create(tmp_path / "ca")
    with pytest.raises(ConfigError, match="name of a certificate"):
        authority.issue(name)


@pytest.mark.parametrize("content", [None, b"nonsense"])
def test_a_missing_or_unreadable_authority_is_one_line(tmp_path: Path, content: bytes | None) -> None:
    """No folder, or rubbish in it: ConfigError names the place."""
    if content is not None:
        (tmp_path / "ca.pem").write_bytes(content)
        (tmp_path / "ca-key.pem").write_bytes(content)
    with pytest.raises(ConfigError, match="certificate authority") as error:
        CertificateAuthority.open(tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_an_authority_that_is_kept_stays_the_same(tmp_path: Path) -> None:
    """Each call finds the key of the first, over the rest of one that was cut off; what it issues lies elsewhere."""
    (tmp_path / "authority.part").mkdir()
    (tmp_path / "authority.part" / "ca-key.pem").write_text("cut off")
    first, again = (CertificateAuthority.kept_in(tmp_path / "authority") for _ in range(2))
    assert again.certificate == first.certificate
    folder = again.issuing_into(tmp_path / "run").issue("node-1")
    certificate(folder).verify_directly_issued_by(first.certificate)
    assert (folder, mode(tmp_path / "authority")) == (tmp_path / "run" / "node-1", 0o700)
    assert sorted(path.name for path in tmp_path.rglob("*.pem") if "run" not in path.parts) == ["ca-key.pem", "ca.pem"]


def test_a_certificate_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    """Of a version that does not exist, with broken extensions, of another kind: the line names the file."""
    good = certificate(CertificateAuthority.create(tmp_path / "ca").issue("node-1")).public_bytes(Encoding.DER)
    version = good.replace(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x05", 1)
    extensions = good.replace(b"\x82\x09localhost", b"\x82\x7flocalhost", 1)
    assert good not in (version, extensions)
    for bad in (ssl.DER_cert_to_PEM_cert(version), ssl.DER_cert_to_PEM_cert(extensions), "", "no certificate"):
        with pytest.raises(ConfigError, match=r"^cert\.pem: is not a certificate in PEM$"):
            read_certificate(bad.encode(), "cert.pem")


def test_a_folder_that_others_use_keeps_its_mode(tmp_path: Path) -> None:
    """`headway certs ca` in a folder such as / closes it to nobody; the key in it is still ours alone."""
    tmp_path.chmod(0o755)
    (tmp_path / "theirs").write_text("")
    CertificateAuthority.create(tmp_path)
    assert (mode(tmp_path), mode(tmp_path / "ca-key.pem")) == (0o755, 0o600)


def trusted(folder: Path) -> list[x509.Certificate]:
    """The authorities of a folder's ca.pem."""
    return x509.load_pem_x509_certificates((folder / "ca.pem").read_bytes())


def issued(authority: CertificateAuthority, name: str) -> x509.Certificate:
    """A node's certificate."""
    return x509.load_pem_x509_certificate((authority.issue(name, role=Role.NODE) / "cert.pem").read_bytes())


def test_both_are_trusted_then_the_new_one_signs_then_it_is_alone(tmp_path: Path) -> None:
    """Certificates of either count as long as both are trusted, and folders made before know both too."""
    old = CertificateAuthority.create(tmp_path / "ca")
    first = issued(old, "first")
    begun = certificates.begin_rotation(tmp_path / "ca")
    assert (begun.certificate, len(trusted(tmp_path / "ca/first"))) == (old.certificate, 2)
    assert issuer_of(issued(begun, "second"), begun.trusted) == old.certificate
    signing = certificates.sign_rotation(tmp_path / "ca")
    assert signing.certificate != old.certificate
    third = issued(signing, "third")
    assert [issuer_of(one, signing.trusted) for one in (first, third)] == [old.certificate, signing.certificate]
    both = signing.trusted
    assert set(signing.derived_keys(b"x", trusted=both)) == set(begun.derived_keys(b"x", trusted=both))
    assert signing.derived_keys(b"x", trusted=both)[0] != begun.derived_keys(b"x", trusted=both)[0]
    last = certificates.drop_rotation(tmp_path / "ca")
    assert signing.derived_keys(b"x", trusted=last.trusted) == last.derived_keys(b"x", trusted=b"damaged")
    assert (issuer_of(first, last.trusted), issuer_of(third, last.trusted)) == (None, signing.certificate)
    for folder in ("ca", "ca/first", "ca/second", "ca/third"):
        assert trusted(tmp_path / folder) == [signing.certificate]
    assert sorted(path.name for path in (tmp_path / "ca").iterdir() if path.is_file()) == ["ca-key.pem", "ca.pem"]
    assert (tmp_path / "ca/ca-key.pem").stat().st_mode & 0o077 == 0


def test_no_step_comes_before_another(tmp_path: Path) -> None:
    """One line says which is next, and nothing changes."""
    folder = CertificateAuthority.create(tmp_path / "ca").directory
    with pytest.raises(ConfigError, match="there is no next authority"):
        certificates.sign_rotation(folder)
    with pytest.raises(ConfigError, match="nothing to drop"):
        certificates.drop_rotation(folder)
    certificates.begin_rotation(folder)
    with pytest.raises(ConfigError, match=r"is there already: once everybody has its ca\.pem, --sign"):
        certificates.begin_rotation(folder)
    with pytest.raises(ConfigError, match="does not sign yet: --sign before --drop"):
        certificates.drop_rotation(folder)
    certificates.sign_rotation(folder)
    with pytest.raises(ConfigError, match="end it with --drop"):
        certificates.begin_rotation(folder)
    assert len(trusted(folder)) == 2


@pytest.mark.parametrize(
    ("before", "step", "num_trusted"), [(0, "begin", 2), (1, "sign", 2), (2, "drop", 1)], ids=["begin", "sign", "drop"]
)
def test_a_step_that_was_killed_at_any_write_is_done_again(
    tmp_path: Path, before: int, step: str, num_trusted: int
) -> None:
    """The authority opens after each of them, whatever step follows, and the same step ends what it has begun."""
    folder, number = tmp_path / "ca", 0
    issued(CertificateAuthority.create(folder), "etcd")
    for earlier in ("begin", "sign")[:before]:
        getattr(certificates, f"{earlier}_rotation")(folder)
    shutil.copytree(folder, tmp_path / "whole")
    while dies_at(number, lambda: getattr(certificates, f"{step}_rotation")(folder)):
        for following in ("begin", "sign", "drop"):
            shutil.copytree(folder, tmp_path / "copy")
            with suppress(ConfigError):
                getattr(certificates, f"{following}_rotation")(tmp_path / "copy")
            CertificateAuthority.open(tmp_path / "copy")
            shutil.rmtree(tmp_path / "copy")
        getattr(certificates, f"{step}_rotation")(folder)
        assert [len(trusted(each)) for each in (folder, folder / "etcd")] == [num_trusted] * 2
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "whole", folder)
        number += 1
    assert number > 3


def test_a_full_disk_costs_the_same_line_once_more(tmp_path: Path) -> None:
    """One line names the file that could not be written, and the step is done again."""
    authority = CertificateAuthority.create(tmp_path / "ca")
    issued(authority, "etcd")
    obstacle = tmp_path / "ca/etcd/ca.pem.part"
    obstacle.mkdir()
    with pytest.raises(ConfigError, match=r"etcd/ca\.pem: cannot be written: .*; then run the same line again"):
        certificates.begin_rotation(authority.directory)
    obstacle.rmdir()
    certificates.begin_rotation(authority.directory)
    assert {len(trusted(tmp_path / folder)) for folder in ("ca", "ca/etcd")} == {2}


def test_a_key_without_its_certificate_is_no_authority(tmp_path: Path) -> None:
    """Somebody has copied one of the two files alone."""
    folder = CertificateAuthority.create(tmp_path / "ca").directory
    other = CertificateAuthority.create(tmp_path / "other").directory
    (folder / "ca.pem").write_bytes((other / "ca.pem").read_bytes())
    with pytest.raises(ConfigError, match=r"has no certificate of ca-key\.pem"):
        CertificateAuthority.open(folder)
