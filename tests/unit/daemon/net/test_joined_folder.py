"""The folder of a machine that joins: what was cut off is done again with the same key, and nothing is overwritten."""

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from headway.daemon.base.errors import ConfigError
from headway.daemon.net import join_client
from headway.daemon.net.certificates import CertificateAuthority
from headway.daemon.net.join_client import Joined, JoinedFolder, start_command
from headway.daemon.net.join_token import JoinAnswer, JoinToken
from headway.stages.sockets.tls_identity import TlsIdentity

TOKEN = JoinToken("n", ("10.0.0.7:7070/join",), bytes(32), b"s" * 24)
FILES = {"ca.pem", "cert.pem", "key.pem", "daemon.toml"}


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond that, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def joined(tmp_path: Path) -> Joined:
    """What the authority has answered."""
    identity = TlsIdentity.read(CertificateAuthority.create(tmp_path / "ca").issue("n"))
    answer = JoinAnswer(
        authority=identity.ca.decode(), certificate=identity.certificate.decode(), role="node", etcd=("10.0.0.5:2379",)
    )
    return Joined(answer, "10.0.0.9")


def public_key(folder: JoinedFolder) -> object:
    """The key that a request asks for."""
    return x509.load_pem_x509_csr(folder.request.encode()).public_key()


def test_a_full_disk_costs_no_token(tmp_path: Path) -> None:
    """One line, and the same line again when there is room: with the same key, which the authority knows by then."""
    with files_of_at_most(64), pytest.raises(ConfigError, match="n: cannot be written: File too large"):
        JoinedFolder(tmp_path / "n", TOKEN)
    folder, answer = JoinedFolder(tmp_path / "n", TOKEN), joined(tmp_path)
    asked = x509.load_pem_x509_csr(folder.request.encode())
    with files_of_at_most(700), pytest.raises(ConfigError, match="then run the same line again"):
        folder.keep(answer, {"site": "x" * 1000})
    again = JoinedFolder(tmp_path / "n", TOKEN)
    assert x509.load_pem_x509_csr(again.request.encode()).public_key() == asked.public_key()
    again.keep(answer, {})
    assert {path.name for path in (tmp_path / "n").iterdir()} == FILES
    key = load_pem_private_key((tmp_path / "n/key.pem").read_bytes(), password=None)
    assert key.public_key() == asked.public_key()
    assert (tmp_path / "n/key.pem").stat().st_mode & 0o077 == 0


class DeadError(BaseException):
    """The process has died."""


@pytest.mark.parametrize("num_made", range(5))
def test_a_join_that_died_at_any_write_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_made: int
) -> None:
    """It dies when so many files and folders are on the disk: the same line, with the same key, makes the rest."""
    folder, answer, made = JoinedFolder(tmp_path / "n", TOKEN), joined(tmp_path), 0

    def make_durable(_: Path) -> None:
        nonlocal made
        if made == num_made:
            raise DeadError
        made += 1

    monkeypatch.setattr(join_client, "make_durable", make_durable)
    if num_made < 4:
        with pytest.raises(DeadError):
            folder.keep(answer, {})
        assert not (tmp_path / "n/key.pem").exists(), "it would count as joined"
        monkeypatch.undo()
        again = JoinedFolder(tmp_path / "n", TOKEN)
        assert public_key(again) == public_key(folder)
        again.keep(answer, {})
    else:
        folder.keep(answer, {})
    assert {path.name for path in (tmp_path / "n").iterdir()} == FILES
    assert made == min(num_made, 4), "three files and their folder come before the key"


def test_an_identity_is_never_touched(tmp_path: Path) -> None:
    """Of somebody who has joined there, or whose files somebody has copied there without a key."""
    JoinedFolder(tmp_path / "n", TOKEN).keep(joined(tmp_path), {})
    start = re.escape(f"has joined already as n: start it with `{start_command(tmp_path / 'n')}`; or name")
    with pytest.raises(ConfigError, match=start):
        JoinedFolder(tmp_path / "n", TOKEN)
    (tmp_path / "n/next-key.pem").write_bytes(b"of a renewal")
    with pytest.raises(ConfigError, match=start):
        JoinedFolder(tmp_path / "n", TOKEN)
    (tmp_path / "n/ca.pem").unlink()
    with pytest.raises(ConfigError, match=r"has key\.pem already; name another folder"):
        JoinedFolder(tmp_path / "n", TOKEN)
    (tmp_path / "m").mkdir()
    (tmp_path / "m/cert.pem").write_bytes(b"somebody's")
    with pytest.raises(ConfigError, match=r"has cert\.pem already; name another folder"):
        JoinedFolder(tmp_path / "m", TOKEN)
