"""What joins by a token: the token itself, and the folder in which a machine joins."""

import re
from pathlib import Path

import pytest
from cryptography import x509

from headway.daemon.base.errors import ConfigError
from headway.daemon.net import join_client
from headway.daemon.net.certificates import CertificateAuthority
from headway.daemon.net.invitation import read_duration
from headway.daemon.net.join_client import Joined, JoinedFolder, start_command
from headway.daemon.net.join_token import JoinAnswer, JoinToken, read_token, write_token
from headway.stages.sockets.tls_identity import TlsIdentity

TOKEN = JoinToken("node-b", ("10.0.0.7:7070/join", "a:1,[::1]:2/n~join"), bytes(range(32)), bytes(range(24)))


def test_a_token_is_one_word_that_comes_back() -> None:
    """Written, copied with a space too many, read. Its secret is in no message about it."""
    word = write_token(TOKEN)
    assert word.replace("-", "").replace("_", "").isalnum()
    assert read_token(f" {word}\n") == TOKEN
    assert "secret" not in repr(TOKEN)


def test_a_damaged_token_is_refused_without_repeating_it() -> None:
    """Each single letter changed or left out, half of it, nothing, another word: one line that does not hold it."""
    word = write_token(TOKEN)
    damaged = [word[:at] + ("A" if word[at] != "A" else "B") + word[at + 1 :] for at in range(len(word))]
    damaged += [word[:at] + word[at + 1 :] for at in range(len(word))]
    for text in (*damaged, word[: len(word) // 2], "", "hw1-", "hw1-ä", "x" * 10_000, word * 30):
        with pytest.raises(ConfigError) as caught:
            read_token(text)
        assert word[8:20] not in str(caught.value)


@pytest.mark.parametrize(
    "token",
    [
        JoinToken("", ("a:1/join",), bytes(32), bytes(24)),
        JoinToken("n", (), bytes(32), bytes(24)),
        JoinToken("n", ("nowhere",), bytes(32), bytes(24)),
        JoinToken("n", ("a:1/join",), bytes(31), bytes(24)),
        JoinToken("n", ("a:1/join",), bytes(32), b""),
    ],
)
def test_a_token_of_no_sense_is_refused(token: JoinToken) -> None:
    """Its check sum is right, but it has no name, no address, no digest or no secret."""
    with pytest.raises(ConfigError):
        read_token(write_token(token))


def test_times_have_units() -> None:
    """90s, 30m, 1h and 7d, and nothing else."""
    assert [read_duration(text, "--lasts") for text in ("90s", "30m", "1h", "7d")] == [90, 1800, 3600, 604800]
    for text in ("", "h", "1", "-1h", "1.5h", "1w", "٣h", "9" * 20 + "d"):
        with pytest.raises(ConfigError, match="--lasts"):
            read_duration(text, "--lasts")


JOIN = JoinToken("n", ("10.0.0.7:7070/join",), bytes(32), b"s" * 24)
FILES = {"ca.pem", "cert.pem", "key.pem", "daemon.toml"}


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


class DeadError(BaseException):
    """The process has died."""


@pytest.mark.parametrize("num_made", range(5))
def test_a_join_that_died_at_any_write_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_made: int
) -> None:
    """It dies when so many files and folders are on the disk: the same line, with the same key, makes the rest."""
    folder, answer, made = JoinedFolder(tmp_path / "n", JOIN), joined(tmp_path), 0

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
        again = JoinedFolder(tmp_path / "n", JOIN)
        assert public_key(again) == public_key(folder)
        again.keep(answer, {})
    else:
        folder.keep(answer, {})
    assert {path.name for path in (tmp_path / "n").iterdir()} == FILES
    assert made == min(num_made, 4), "three files and their folder come before the key"


def test_an_identity_is_never_touched(tmp_path: Path) -> None:
    """Of somebody who has joined there, or whose files somebody has copied there without a key."""
    JoinedFolder(tmp_path / "n", JOIN).keep(joined(tmp_path), {})
    start = re.escape(f"has joined already as n: start it with `{start_command(tmp_path / 'n')}`; or name")
    with pytest.raises(ConfigError, match=start):
        JoinedFolder(tmp_path / "n", JOIN)
    (tmp_path / "n/next-key.pem").write_bytes(b"of a renewal")
    with pytest.raises(ConfigError, match=start):
        JoinedFolder(tmp_path / "n", JOIN)
    (tmp_path / "n/ca.pem").unlink()
    with pytest.raises(ConfigError, match=r"has key\.pem already; name another folder"):
        JoinedFolder(tmp_path / "n", JOIN)
    (tmp_path / "m").mkdir()
    (tmp_path / "m/cert.pem").write_bytes(b"somebody's")
    with pytest.raises(ConfigError, match=r"has cert\.pem already; name another folder"):
        JoinedFolder(tmp_path / "m", JOIN)
