"""A data folder comes into being whole or not at all."""

import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest

from headway.stages.data.shard_index import read_index
from headway.stages.data.shard_writer import DataForm, writing_shards
from headway.stages.data.stdlib_corpus import builtin_corpus, docs_corpus, stdlib_sources
from headway.stages.data.tokens import TokenShards
from headway.stages.errors import DataError


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    """An exception after some tokens: neither the folder nor a draft of it."""

    def fail_half_way() -> None:
        with writing_shards(tmp_path / "data", DataForm(vocab_size=256)) as writer:
            writer.append(np.zeros(10, dtype=np.uint8))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_half_way()
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    """Writing where something lies is refused before anything is written."""
    (tmp_path / "data").mkdir()
    with (
        pytest.raises(DataError, match="exists already"),
        writing_shards(tmp_path / "data", DataForm(vocab_size=256)),
    ):
        pytest.fail("the block must not be entered")


def test_of_two_writers_the_first_to_end_wins(tmp_path: Path) -> None:
    """The second finds the folder there at its end, raises, and cleans up its draft."""

    def end_second() -> None:
        with writing_shards(tmp_path / "data", DataForm(vocab_size=256)) as slow:
            slow.append(np.full(10, 1))
            with writing_shards(tmp_path / "data", DataForm(vocab_size=256)) as quick:
                quick.append(np.full(10, 2))

    with pytest.raises(DataError, match="exists already"):
        end_second()
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert (tmp_path / "data" / "shard-00000.bin").read_bytes() == bytes([2] * 10)


@pytest.mark.parametrize("token", [-1, 256])
def test_a_token_outside_the_vocabulary_is_refused(tmp_path: Path, token: int) -> None:
    """It would have become another token in the file."""
    with (
        pytest.raises(DataError, match="outside the vocabulary"),
        writing_shards(tmp_path / "data", DataForm(vocab_size=256)) as writer,
    ):
        writer.append(np.array([1, token]))


def test_shards_do_not_depend_on_how_tokens_arrive(tmp_path: Path) -> None:
    """One array, or pieces across the shards' ends: the same files, the same name."""
    tokens = np.arange(100)
    with writing_shards(tmp_path / "a", DataForm(vocab_size=256, most_tokens=30)) as writer:
        writer.append(tokens)
    with writing_shards(tmp_path / "b", DataForm(vocab_size=256, most_tokens=30)) as writer:
        for piece in np.split(tokens, [1, 1, 29, 31, 95]):
            writer.append(piece)
    a, b = (TokenShards.open(tmp_path / name) for name in "ab")
    assert a.index == b.index
    assert [shard.num_tokens for shard in a.index.shards] == [30, 30, 30, 10]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder that four threads have asked for the built-in corpus at once."""
    folder = tmp_path_factory.mktemp("cache")
    start = Barrier(4)

    def ask(_: int) -> Path:
        start.wait(timeout=30)
        return builtin_corpus(folder)

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(ask, range(4)))) == 1
    return folder


def test_the_builtin_corpus_is_written_once(cache: Path) -> None:
    """Four ask at once: one folder, no drafts, at least 8 MB, and what it says of itself is true."""
    assert len(list(cache.iterdir())) == 1
    shards = TokenShards.open(builtin_corpus(cache))
    assert shards.vocab_size == 256
    assert shards.num_tokens >= 8_000_000


def test_the_documentation_as_data_never_changes(tmp_path: Path) -> None:
    """The README tells the loss of a job on it, so its bytes are those of the first release that had it."""
    assert read_index(docs_corpus(tmp_path)).sha256.startswith("99c78f10838d")


def test_the_builtin_corpus_is_python(cache: Path) -> None:
    """Its first file, byte for byte, then the end-of-file token."""
    (file,) = builtin_corpus(cache).glob("*.bin")
    first = next(stdlib_sources(Path(sysconfig.get_path("stdlib"))))
    assert file.read_bytes().startswith(first.read_bytes() + b"\0")


def test_sources_that_differ_between_machines_are_left_out(tmp_path: Path) -> None:
    """Order is by name; site packages, tests and the build's own record do not count."""
    for name in (
        "z.py",
        "a/b.py",
        "a.py",
        "site-packages/x.py",
        "json/tests/y.py",
        "_sysconfigdata__linux.py",
        "c.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = [file.relative_to(tmp_path).as_posix() for file in stdlib_sources(tmp_path)]
    assert found == ["a.py", "a/b.py", "z.py"]


def test_a_python_without_sources_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation of compiled files only: one error that says what to do, and nothing in the cache."""
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path / "library"))
    (tmp_path / "library").mkdir()
    with pytest.raises(DataError, match="name a data folder"):
        builtin_corpus(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
