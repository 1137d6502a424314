"""Tokens as people copy them, and the small rules of invitations."""

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.net.invitation import read_duration
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


def test_times_have_units() -> None:
    """90s, 30m, 1h and 7d, and nothing else."""
    assert [read_duration(text, "--lasts") for text in ("90s", "30m", "1h", "7d")] == [90, 1800, 3600, 604800]
    for text in ("", "h", "1", "-1h", "1.5h", "1w", "٣h", "9" * 20 + "d"):
        with pytest.raises(ConfigError, match="--lasts"):
            read_duration(text, "--lasts")
