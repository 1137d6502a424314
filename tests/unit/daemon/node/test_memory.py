"""A node's folders: what it remembers over restarts, and that of its workers' socket."""

import errno
import shlex
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.daemon.base.errors import ConfigError, InvariantLostError
from headway.daemon.cluster.records import seen_key
from headway.daemon.node.lifecycle import MAX_RUNTIME_DIR_BYTES, _make_runtime_dir
from headway.daemon.node.memory import NUM_JOBS_REMEMBERED, NUM_SUBMISSIONS_REMEMBERED, NodeMemory


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[NodeMemory]:
    memory = NodeMemory(tmp_path)
    memory.open()
    yield memory
    memory.close()


def saw(memory: NodeMemory, job: str, uid: str, generation: int, **others: int) -> bool:
    """etcd has this job, and others by name."""
    return memory.saw_generations({job: generation, seen_key(job, uid): generation} | others)


def test_only_a_higher_generation_is_written_and_it_survives_a_restart(memory: NodeMemory, tmp_path: Path) -> None:
    """3, then 2 of the same job: nothing new. The next daemon on this folder knows 3."""
    assert saw(memory, "demo", "u", 3)
    assert not saw(memory, "demo", "u", 2)
    memory.close()
    again = NodeMemory(tmp_path)
    again.open()
    assert again.generations == {"demo": 3, "demo/u": 3}
    again.close()


def test_the_oldest_of_many_jobs_are_forgotten_with_their_submissions(memory: NodeMemory) -> None:
    """Jobs come and go, one stays in etcd all the time: the newest and that one are remembered, whole."""
    saw(memory, "stays", "u", 7)
    for number in range(2 * NUM_JOBS_REMEMBERED):
        saw(memory, f"job-{number}", "u", 1, **{"stays": 7, "stays/u": 7})
    assert memory.generations["stays/u"] == memory.generations["stays"] == 7
    newest = range(NUM_JOBS_REMEMBERED, 2 * NUM_JOBS_REMEMBERED)
    assert memory.generations.keys() == {
        "stays", "stays/u", *(f"job-{n}" for n in newest), *(f"job-{n}/u" for n in newest)
    }  # fmt: skip


def test_the_newest_submissions_of_a_name_are_remembered(memory: NodeMemory, tmp_path: Path) -> None:
    """A name is submitted again and again, also after a restart: the last few are known, and the highest of all."""
    num = 3 * NUM_SUBMISSIONS_REMEMBERED
    for number in range(num):
        saw(memory, "demo", f"u{number}", number + 1)
        if number == num - 2:
            memory.close()
            memory = NodeMemory(tmp_path)
            memory.open()
    kept = range(num - NUM_SUBMISSIONS_REMEMBERED, num)
    assert memory.generations == {"demo": num} | {f"demo/u{number}": number + 1 for number in kept}
    memory.close()


def test_a_generation_that_cannot_be_written_does_not_count(
    memory: NodeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full: the node keeps its old numbers until there is room."""
    assert saw(memory, "demo", "u", 3)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(memory, "_write_now", full)
        with pytest.raises(OSError, match="No space left"):
            saw(memory, "demo", "u", 4)
        assert memory.generations == {"demo": 3, "demo/u": 3}
    assert saw(memory, "demo", "u", 4)
    assert memory.generations == {"demo": 4, "demo/u": 4}


def test_a_recreated_state_folder_is_locked_again(memory: NodeMemory, tmp_path: Path) -> None:
    """It was deleted under the daemon. If another daemon has locked the new one, this daemon ends."""
    saw(memory, "demo", "u", 3)
    for path in tmp_path.iterdir():
        path.unlink()
    memory.check_lock()
    other = NodeMemory(tmp_path)
    with pytest.raises(ConfigError, match="another daemon runs"):
        other.open()
    assert other._read_generations() == {"demo": 3, "demo/u": 3}
    (tmp_path / "daemon.lock").unlink()
    other.open()
    with pytest.raises(InvariantLostError, match="another daemon runs on this state_dir"):
        memory.check_lock()
    other.close()


def test_a_damaged_memory_names_the_command_that_sets_it_aside(memory: NodeMemory, tmp_path: Path) -> None:
    """One line with the file, the command and what is lost; after the command the node starts."""
    memory.saw_generations({"job": 3})
    memory.close()
    (path,) = tmp_path.rglob("generations.json")
    path.write_bytes(path.read_bytes().replace(b"3", b"s"))
    again = NodeMemory(path.parent)
    with pytest.raises(ConfigError, match=r"generations\.json: is damaged .*sets it aside: lost is") as refused:
        again.open()
    again.close()
    command = str(refused.value).split("`")[1]
    assert subprocess.run(shlex.split(command), check=True).returncode == 0
    again.open()
    assert again.generations == {}
    again.close()


def test_remains_of_a_killed_daemon_are_cleared_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two daemons in a row on one state folder, the first killed: the second has the same folder, empty and private."""
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path))
    monkeypatch.setattr("headway.daemon.node.lifecycle.MAX_RUNTIME_DIR_BYTES", 1000)
    first = _make_runtime_dir(tmp_path / "state")
    (first / "workers.sock").touch()
    second = _make_runtime_dir(tmp_path / "state")
    assert second == first
    assert list(second.iterdir()) == []
    assert stat.S_IMODE(second.stat().st_mode) == 0o700
    assert _make_runtime_dir(tmp_path / "other state") != first


def test_a_folder_too_deep_for_a_socket_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime folder's path is too long for a unix socket: a short one is taken."""
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path / ("x" * MAX_RUNTIME_DIR_BYTES)))
    made = _make_runtime_dir(tmp_path)
    made.rmdir()
    assert len(str(made)) <= MAX_RUNTIME_DIR_BYTES


def test_somebody_elses_folder_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file stands where the folder would be and cannot be removed as a folder: another name is taken."""
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path))
    monkeypatch.setattr("headway.daemon.node.lifecycle.MAX_RUNTIME_DIR_BYTES", 1000)
    first = _make_runtime_dir(tmp_path)
    first.rmdir()
    first.write_text("theirs")
    second = _make_runtime_dir(tmp_path)
    assert second != first
    assert first.read_text() == "theirs"
