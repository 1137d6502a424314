"""Calls that a file system never answers: they cost a few threads of their own, and nobody else anything."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headway.daemon.base.errors import ConfigError, RecoveryError
from headway.daemon.blobs import file_threads
from headway.daemon.blobs.checkpoint import copy_to_checkpoint, list_boundaries, write_manifest
from headway.daemon.blobs.file_threads import AbandonedError, Beat, FileThreads
from tests.rigs.moody_file_system import Mood, moody

URL = "moody://bucket/j/u"


@pytest.fixture
def mood(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mood]:
    monkeypatch.setattr(file_threads, "SOON_S", 0.0)
    with moody() as mood:
        yield mood


def write(_: Beat) -> None:
    write_manifest(URL, b"{}")


async def test_a_hung_file_system_takes_a_few_threads_and_no_others(mood: Mood) -> None:
    """Twenty manifests: three threads hang, the rest is refused at once, and every other call of a thread is served."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
    threads = FileThreads("manifests", silence_s=0.05, most_hung=3)
    mood.gate.clear()
    reasons = []
    for _ in range(20):
        with pytest.raises(RecoveryError, match=r"^moody://bucket/j/u: its file system") as caught:
            await threads.run(URL, write)
        reasons.append(caught.value.reason)
    assert threads.num_hung == mood.num_calls == 3
    assert "has not answered for 0.05 s" in reasons[0]
    assert "hangs: 3 earlier calls have no answer, the first for" in reasons[-1]
    assert await asyncio.wait_for(asyncio.to_thread(lambda: 7), 10.0) == 7
    assert await threads.run("/another/file/system", lambda _: 8) == 8
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("manifests"))
    mood.gate.set()
    while threads.num_hung:
        await asyncio.sleep(0.001)
    await threads.run(URL, write)


async def test_hung_calls_give_their_slots_back(mood: Mood) -> None:
    """Two slots, two copies that hang: the third gets its turn when the time of the first is over."""
    threads = FileThreads("copies", num_at_once=2, silence_s=0.2, most_hung=9)
    mood.gate.clear()
    hung = [asyncio.create_task(threads.run(URL, write)) for _ in range(2)]
    while mood.num_calls < 2:
        await asyncio.sleep(0.001)
    assert await asyncio.wait_for(threads.run(URL, lambda _: 7), 10.0) == 7
    for task in hung:
        with pytest.raises(RecoveryError, match="has not answered"):
            await task


async def test_a_slow_call_that_moves_is_not_hung() -> None:
    """It takes twice its silence, and says so at each step."""
    threads = FileThreads("copies", silence_s=0.5)
    pause = threading.Event()

    def steps(beat: Beat) -> int:
        for _ in range(20):
            pause.wait(0.05)
            beat()
        return 20

    assert await threads.run(URL, steps) == 20


async def test_a_call_that_was_given_up_ends_at_its_next_step() -> None:
    """Its asker is cancelled in the middle: the thread goes no further."""
    threads = FileThreads("copies")
    began, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    said: list[str] = []

    def act(beat: Beat) -> None:
        began.set()
        go_on.wait()
        try:
            beat()
            said.append("it went on")
        except AbandonedError:
            said.append("abandoned")
            raise
        finally:
            ended.set()

    task = asyncio.create_task(threads.run(URL, act))
    await asyncio.to_thread(began.wait)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    go_on.set()
    await asyncio.to_thread(ended.wait)
    assert said == ["abandoned"]


BOUNDARY = "00000001-0000000005"


@pytest.mark.parametrize("what", ["manifest", "layer"])
@pytest.mark.parametrize("where", ["object store", "local"])
async def test_a_write_that_was_given_up_does_not_appear_later(
    mood: Mood, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str, what: str
) -> None:
    """It hangs for its time. When the file system answers again, the file does not appear."""
    source = tmp_path / "layer"
    source.write_bytes(b"layer")
    folder, go_on = tmp_path / "checkpoints", threading.Event()
    url = f"{folder}/{BOUNDARY}" if where == "local" else f"{URL}/{BOUNDARY}"
    monkeypatch.setattr("headway.daemon.blobs.checkpoint.os.fsync", lambda _: go_on.wait())
    mood.gate.clear()

    def act(beat: Beat) -> None:
        if what == "manifest":
            write_manifest(url, b"{}", beat=beat)
        else:
            copy_to_checkpoint(source, url, "head", beat=beat)

    threads, late = FileThreads("writes", silence_s=0.05), asyncio.Event()
    with pytest.raises(RecoveryError, match="has not answered"):
        await threads.run(url, act, on_late=late.set)
    assert not late.is_set()
    go_on.set()
    mood.gate.set()
    await asyncio.wait_for(late.wait(), 10.0)
    assert threads.num_hung == 0
    assert not mood.num_closing
    assert not [path for path in folder.rglob("*") if path.is_file()]


async def test_a_write_that_hangs_in_its_last_step_is_reported_when_it_ends(mood: Mood) -> None:
    """The manifest was sent and its server is silent: it appears after it was given up, and its owner hears of it."""
    threads, late = FileThreads("manifests", silence_s=0.05), asyncio.Event()
    mood.closing.clear()
    with pytest.raises(RecoveryError, match="has not answered"):
        await threads.run(URL, lambda beat: write_manifest(f"{URL}/{BOUNDARY}", b"{}", beat=beat), on_late=late.set)
    mood.closing.set()
    await asyncio.wait_for(late.wait(), 10.0)
    assert list_boundaries(URL) == [(1, 5, True)]


async def test_whatever_a_call_raises_names_the_url() -> None:
    """A KeyError of some driver is a RecoveryError here; what the user has to change stays his."""

    def raise_(error: Exception) -> None:
        raise error

    threads = FileThreads("reads")
    with pytest.raises(RecoveryError, match="moody://bucket/j/u: KeyError: 'x'"):
        await threads.run(URL, lambda _: raise_(KeyError("x")))
    with pytest.raises(ConfigError):
        await threads.run(URL, lambda _: raise_(ConfigError("wrong")))


async def test_a_stop_iteration_from_a_driver_is_no_hang() -> None:
    """No future accepts it, yet the slot is free at once."""
    threads = FileThreads("manifests", num_at_once=1, silence_s=30.0)

    def act(_: Beat) -> int:
        raise StopIteration

    for _ in range(5):
        with pytest.raises(RecoveryError, match="StopIteration"):
            await asyncio.wait_for(threads.run(URL, act), 5.0)
    assert threads.num_hung == 0


async def test_a_thread_that_cannot_be_started_is_told_with_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process at its limit of threads: one sentence, and nothing is left behind."""
    threads = FileThreads("manifests")

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RecoveryError, match=r"^moody://bucket/j/u: this node has no thread left"):
        await threads.run(URL, lambda _: 7)
    assert threads.num_hung == 0


async def test_a_read_that_is_given_up_closes_its_file_in_a_thread() -> None:
    """A file system that hangs in `close` would otherwise stop the event loop."""
    closed_by = []

    def read(_: Beat) -> Iterator[bytes]:
        try:
            yield b"first"
            yield b"second"
        finally:
            closed_by.append(threading.current_thread())

    async with contextlib.aclosing(FileThreads("reads").pieces(URL, read)) as pieces:
        assert await anext(pieces) == b"first"
    assert len(closed_by) == 1
    assert closed_by[0] is not threading.main_thread()
