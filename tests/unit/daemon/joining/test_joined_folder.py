"""The folder of a machine that joins: what cannot be kept shows before the token is spent."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headway.daemon.errors import ConfigError
from headway.daemon.joining.join_client import Joined
from headway.daemon.joining.join_messages import JoinAnswer
from headway.daemon.joining.join_token import JoinToken
from headway.daemon.joining.joined_folder import JoinedFolder
from headway.daemon.rpc.certificates import CertificateAuthority
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


def test_a_full_disk_shows_before_the_token_is_spent(tmp_path: Path) -> None:
    """One line, no file left; with room for them the same folder takes the files, and nothing else stays there."""
    with files_of_at_most(4096), pytest.raises(ConfigError, match="n: cannot be written: File too large"):
        JoinedFolder(tmp_path / "n", TOKEN)
    assert not list((tmp_path / "n").iterdir())
    folder = JoinedFolder(tmp_path / "n", TOKEN)
    with files_of_at_most(64 << 10):  # what was free before is full by now: the files take the room that was kept
        folder.keep(joined(tmp_path), {})
    assert {path.name for path in (tmp_path / "n").iterdir()} == FILES


def test_a_refusal_leaves_nothing_behind(tmp_path: Path) -> None:
    """The next attempt may use the same folder; one that has an identity is never touched."""
    JoinedFolder(tmp_path / "n", TOKEN).give_up()
    assert not list((tmp_path / "n").iterdir())
    folder = JoinedFolder(tmp_path / "n", TOKEN)
    folder.keep(joined(tmp_path), {})
    folder.give_up()
    with pytest.raises(ConfigError, match=r"has ca\.pem already; name another folder"):
        JoinedFolder(tmp_path / "n", TOKEN)
    assert {path.name for path in (tmp_path / "n").iterdir()} == FILES
