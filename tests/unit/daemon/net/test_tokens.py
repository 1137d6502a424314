"""Tokens as people copy them, and the small rules of invitations."""

import hashlib
import hmac
from dataclasses import replace

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.cluster.cluster_records import InvitationRecord
from headway.daemon.net.invitation import is_true, read_duration, sealed
from headway.daemon.net.join_port import FloodGuard
from headway.daemon.net.join_token import JoinToken, read_token, write_token

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


def test_a_flood_is_forgotten_when_it_ends() -> None:
    """Five at once and one a second: of a thousand at once five are heard, and a second later the next one."""
    guard = FloodGuard(per_s=1.0, burst=5, now=0.0)
    assert sum(guard.lets_in(0.0) for _ in range(1000)) == 5
    assert not guard.lets_in(0.9)
    assert guard.lets_in(1.0)
    assert sum(guard.lets_in(100.0) for _ in range(1000)) == 5


def test_times_have_units() -> None:
    """90s, 30m, 1h and 7d, and nothing else."""
    assert [read_duration(text, "--lasts") for text in ("90s", "30m", "1h", "7d")] == [90, 1800, 3600, 604800]
    for text in ("", "h", "1", "-1h", "1.5h", "1w", "٣h", "9" * 20 + "d"):
        with pytest.raises(ConfigError, match="--lasts"):
            read_duration(text, "--lasts")


def test_an_invitation_of_an_earlier_release_is_true() -> None:
    """It knew of no key that has joined, and sealed these bytes. A key that has joined is under the seal too."""
    raw = (
        b'{"format":1,"name":"n","role":"node","hosts":["h"],"etcd":["10.0.0.5:2379"],"secret_sha256":"ab",'
        b'"expires_at":2.5,"valid_s":60.0,"replaces":"","invited_by":["me"],"seal":""}'
    )
    seal = hmac.new(b"key", raw, hashlib.sha256).hexdigest()
    record = InvitationRecord(
        name="n",
        role="node",
        hosts=("h",),
        etcd=("10.0.0.5:2379",),
        secret_sha256="ab",
        expires_at=2.5,
        valid_s=60.0,
        invited_by=("me",),
        seal=seal,
    )
    assert is_true(record, [b"key"])
    assert sealed(record, b"key") == record
    assert not is_true(replace(record, key_sha256="cd"), [b"key"])
    used = sealed(replace(record, key_sha256="cd"), b"key")
    assert is_true(used, [b"key"])
    assert not is_true(replace(used, key_sha256=""), [b"key"])
