"""A preparation that was stopped goes on where its journal ends, encodes nothing twice, and writes the same bytes."""

import errno
import fcntl
import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.text import batch_encoding, file_content
from headway.daemon.text import prepare as preparing
from headway.daemon.text import prepare as restartable_run
from headway.daemon.text.preparation import Preparation
from headway.daemon.text.summary import Prepared
from headway.daemon.text.unfinished import Unfinished
from headway.stages.data.shard_writer import DataForm, ShardWriter, SplitWriter

KINDS: dict[str, dict[str, Any]] = {
    "stream": {"max_bad": 5},
    "rows": {"max_bad": 5, "pack": 40, "validation": 0.3},
    "flags": {"max_bad": 5, "flags": True, "max_tokens": 20_000},
}
PLACES: dict[str, tuple[Any, str, bool]] = {
    "write": (SplitWriter, "_write", False),
    "before the journal": (Unfinished, "save", False),
    "after the journal": (Unfinished, "save", True),
    "before the name": (ShardWriter, "close", True),
    "after the name": (preparing, "publish", True),
}
"""Where a process dies: in which function, and whether after it."""


def shrink(patch: Callable[[Any, str, Any], None]) -> None:
    """Make file_content, batches and shards small, and each batch end with a journal."""
    patch(file_content, "PIECE_BYTES", 200)
    patch(file_content, "MAX_PIECE_BYTES", 400)
    patch(batch_encoding, "BATCH_BYTES", 1000)
    patch(restartable_run, "SAVE_EVERY_S", 0.0)
    patch(restartable_run, "SAVING_SHARE", 1e9)
    patch(preparing, "DataForm", partial(DataForm, most_tokens=5000))


def interrupt(
    place: str, number: int, do: Callable[[], None], patch: Callable[[Any, str, Any], None] = setattr
) -> None:
    """Do something at the so manieth call of a place."""
    owner, name, is_after = PLACES[place]
    original, calls = getattr(owner, name), [0]

    def interrupted(*given: Any, **more: Any) -> Any:
        calls[0] += 1
        if calls[0] == number and not is_after:
            do()
        found = original(*given, **more)
        if calls[0] == number and is_after:
            do()
        return found

    patch(owner, name, interrupted)


def sources(folder: Path) -> list[str]:
    """JSON lines with two bad ones, a long text without lines, and further JSON lines."""
    for name, start in [("a.jsonl", 0), ("c.jsonl", 500)]:
        lines = [json.dumps({"text": f"text {number} " * (number % 13)}) for number in range(start, start + 100)]
        lines[7] = "no JSON"
        (folder / name).write_text("\n".join(lines) + "\n")
    (folder / "b.txt").write_text("".join(f"word{number} " for number in range(1500)))
    return [str(folder / name) for name in ("a.jsonl", "b.txt", "c.jsonl")]


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


BRANCHES = multiprocessing.get_context("forkserver")
"""Makes processes from one that has imported what takes long."""
BRANCHES.set_forkserver_preload(["pytest", preparing.__name__])


def killed(given: list[str], out: Path, options: dict[str, Any], place: str, number: int) -> None:
    """Prepare in a process that kills itself."""
    process = BRANCHES.Process(target=prepare_and_die, args=(given, out, options, place, number))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def prepare_and_die(given: list[str], out: Path, options: dict[str, Any], place: str, number: int) -> None:
    """Prepare in this process, and kill it."""
    shrink(setattr)
    interrupt(place, number, lambda: os.kill(os.getpid(), signal.SIGKILL))
    preparing.prepare(given, out, Preparation(**options))


class Again:
    """Runs in this process, with what they warned of and how many bytes of text they encoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.warnings: list[str] = []
        self.num_encoded = 0
        shrink(monkeypatch.setattr)
        encoded = batch_encoding._texts

        def counted(texts: Any, *rest: Any) -> Any:
            self.num_encoded += sum(len(text) for text, _ in texts)
            return encoded(texts, *rest)

        monkeypatch.setattr(batch_encoding, "_texts", counted)

    def run(self, given: list[str], out: Path, options: dict[str, Any]) -> Prepared:
        self.warnings.clear()
        self.num_encoded = 0
        return preparing.prepare(given, out, Preparation(**options), warn=self.warnings.append)


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> Again:
    return Again(monkeypatch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("place", "number"),
    [
        ("write", 1),
        ("write", 90),
        ("before the journal", 1),
        ("before the journal", 9),
        ("after the journal", 2),
        ("after the journal", 12),
        ("before the name", 1),
    ],
)
def test_after_a_kill_the_bytes_are_those_of_one_run(
    tmp_path: Path, again: Again, kind: str, place: str, number: int
) -> None:
    """SIGKILL before a journal, between two, while one is written, and at the end: equal files, counts and index."""
    given = sources(tmp_path)
    whole = again.run(given, tmp_path / "whole", KINDS[kind])
    everything = again.num_encoded
    killed(given, tmp_path / "out", KINDS[kind], place, number)
    assert not (tmp_path / "out").exists()
    assert again.run(given, tmp_path / "out", KINDS[kind]) == whole
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert [path.name for path in tmp_path.glob(".*")] == []
    if place == "after the journal":
        assert 0 < again.num_encoded <= everything - 1000 * number
        assert "goes on after" in again.warnings[0]
    if place == "before the name":
        assert again.num_encoded <= everything // 5


def test_a_run_may_be_killed_again_and_again(tmp_path: Path, again: Again) -> None:
    """Four kills, each a few journals later."""
    given = sources(tmp_path)
    again.run(given, tmp_path / "whole", KINDS["rows"])
    everything = again.num_encoded
    for _ in range(4):
        killed(given, tmp_path / "out", KINDS["rows"], "after the journal", 3)
    again.run(given, tmp_path / "out", KINDS["rows"])
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert again.num_encoded <= everything - 4 * 3 * 1000


def test_a_kill_after_the_end_leaves_the_folder_whole(tmp_path: Path, again: Again) -> None:
    """The data has its name, and only the journal is left beside it."""
    given = sources(tmp_path)
    again.run(given, tmp_path / "whole", KINDS["rows"])
    killed(given, tmp_path / "out", KINDS["rows"], "after the name", 1)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_conversations_go_on_too(tmp_path: Path, again: Again) -> None:
    """With a tokenizer and its template, packed: the tokenizer's files lie beside the shards in the end."""
    pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2")
    from tests.rigs.tiny_chats import write_chat_tokenizer, write_chats

    (tmp_path / "model").mkdir()
    write_chat_tokenizer(tmp_path / "model")
    write_chats(tmp_path / "chats.jsonl")
    options = {"chat": True, "tokenizer": str(tmp_path / "model"), "pack": 64, "validation": 0.2}
    given = [str(tmp_path / "chats.jsonl")]
    again.run(given, tmp_path / "whole", options)
    killed(given, tmp_path / "out", options, "after the journal", 20)
    again.run(given, tmp_path / "out", options)
    assert "goes on after" in again.warnings[0]
    assert content(tmp_path / "out") == content(tmp_path / "whole")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_ctrl_c_and_a_full_disk_leave_what_is_done(
    tmp_path: Path, again: Again, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """The run ends with its error and says where the rest lies; the next goes on."""
    given = sources(tmp_path)
    again.run(given, tmp_path / "whole", KINDS["rows"])

    def fail() -> None:
        raise error

    with monkeypatch.context() as patch:
        interrupt("write", 60, fail, patch.setattr)
        with pytest.raises((KeyboardInterrupt, ConfigError)):
            again.run(given, tmp_path / "out", KINDS["rows"])
    assert "the same command goes on from there" in again.warnings[-1]
    again.run(given, tmp_path / "out", KINDS["rows"])
    assert "goes on after" in again.warnings[0]
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def touch_input(folder: Path) -> None:
    """Another content of the same length."""
    text = (folder / "c.jsonl").read_text().replace("text 5", "page 5")
    (folder / "c.jsonl").write_text(text)


def damage_journal(folder: Path) -> None:
    """One bit."""
    place = folder / ".out.unfinished" / "journal"
    raw = bytearray(place.read_bytes())
    raw[len(raw) // 2] ^= 1
    place.write_bytes(raw)


def cut_journal(folder: Path) -> None:
    """Its second half is lost."""
    place = folder / ".out.unfinished" / "journal"
    place.write_bytes(place.read_bytes()[: place.stat().st_size // 2])


def damage_shard(folder: Path) -> None:
    """One bit of the first finished shard."""
    place = folder / ".out.unfinished" / "data" / "shard-00000.bin"
    raw = bytearray(place.read_bytes())
    raw[10] ^= 1
    place.write_bytes(raw)


def cut_growing(folder: Path) -> None:
    """A power loss took what was written last."""
    place = max((folder / ".out.unfinished" / "data").glob("shard-*.bin"))
    os.truncate(place, place.stat().st_size // 3)


def remove_shard(folder: Path) -> None:
    (folder / ".out.unfinished" / "data" / "shard-00000.bin").unlink()


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (touch_input, {}),
        (damage_journal, {}),
        (cut_journal, {}),
        (damage_shard, {}),
        (cut_growing, {}),
        (remove_shard, {}),
        (None, {"max_tokens": 15_000}),
        (None, {"flags": True}),
        (None, {"validation": 0.1}),
    ],
)
def test_what_does_not_match_starts_afresh(
    tmp_path: Path, again: Again, change: Callable[[Path], None] | None, options: dict[str, Any]
) -> None:
    """Other input, other options, damage: one line says so, everything is encoded, and the bytes are right."""
    given = sources(tmp_path)
    killed(given, tmp_path / "out", KINDS["stream"], "after the journal", 15)
    if change:
        change(tmp_path)
    again.run(given, tmp_path / "whole", KINDS["stream"] | options)
    everything = again.num_encoded
    again.run(given, tmp_path / "out", KINDS["stream"] | options)
    assert again.num_encoded == everything
    assert "all starts afresh" in again.warnings[0]
    assert sum("afresh" in warning or "goes on" in warning for warning in again.warnings) == 1
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_two_runs_do_not_share_a_folder(tmp_path: Path, again: Again) -> None:
    """While one process holds the unfinished folder, a second is refused in one line, and disturbs nothing."""
    given = sources(tmp_path)
    (tmp_path / ".out.unfinished").mkdir()
    lock = os.open(tmp_path / ".out.unfinished", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match="out: is being prepared by another process"):
        again.run(given, tmp_path / "out", KINDS["stream"])
    os.close(lock)
    again.run(given, tmp_path / "out", KINDS["stream"])


def test_a_folder_of_another_user_is_left_alone(tmp_path: Path, again: Again, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another user put there is neither read nor deleted."""
    (tmp_path / ".out.unfinished" / "data").mkdir(parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match=r"\.out\.unfinished: belongs to another user"):
        again.run(sources(tmp_path), tmp_path / "out", KINDS["stream"])
    assert (tmp_path / ".out.unfinished" / "data").exists()


def test_a_file_system_without_locks_is_named(tmp_path: Path, again: Again, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as no other process."""

    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match=r"cannot be locked: Function not implemented; name a folder of another"):
        again.run(sources(tmp_path), tmp_path / "out", KINDS["stream"])
