"""The three steps of a change of the authority, in a folder: each only after the one before, and repeatable."""

import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography import x509

from headway.daemon.base.errors import ConfigError
from headway.daemon.net import certificates
from headway.daemon.net.certificates import CertificateAuthority, issuer_of
from headway.stages.sockets.roles import Role
from tests.rigs.mortal_work import dies_at


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


def test_a_step_that_was_cut_off_is_done_again(tmp_path: Path) -> None:
    """The key is written, and not yet the certificate; the old key is kept, and the new one not yet in its place."""
    folder = CertificateAuthority.create(tmp_path / "ca").directory
    (folder / "next-ca-key.pem").write_bytes((folder / "ca-key.pem").read_bytes())
    begun = certificates.begin_rotation(folder)
    (folder / "old-ca-key.pem").write_bytes((folder / "ca-key.pem").read_bytes())
    assert certificates.sign_rotation(folder).certificate != begun.certificate
    assert len(trusted(folder)) == 2


@pytest.mark.parametrize("num_written", [1, 2, 3])
def test_a_first_step_that_was_cut_off_reaches_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_written: int
) -> None:
    """It dies after any of its files: the next call ends with both authorities in all of them."""
    authority = CertificateAuthority.create(tmp_path / "ca")
    for name in ("etcd", "first"):
        issued(authority, name)
    write, written = certificates._write, list[Path]()

    def die(path: Path, content: bytes) -> None:
        write(path, content)
        written.append(path)
        if len(written) == num_written:
            raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(certificates, "_write", die)
        with pytest.raises(SystemExit):
            certificates.begin_rotation(authority.directory)
    certificates.begin_rotation(authority.directory)
    assert {len(trusted(tmp_path / folder)) for folder in ("ca", "ca/etcd", "ca/first")} == {2}


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
