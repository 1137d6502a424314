"""Logs that are read for people, on a file system that may hang."""

import asyncio
import os
from pathlib import Path

from headway.daemon.base.errors import StorageAwayError
from headway.daemon.blobs.file_threads import FileThreads
from headway.daemon.node.service import read_log

NUM_READERS = 40
"""More than the threads that a daemon has for its other work."""


async def test_logs_that_do_not_answer_hold_up_no_other_work(tmp_path: Path) -> None:
    """Everybody who asks for one is told; the threads that send layers to other nodes are free."""
    path, threads = tmp_path / "job.log", FileThreads("logs", num_at_once=4, silence_s=2.1)
    os.mkfifo(path)  # whoever opens it waits for a writer

    async def read() -> list[str]:
        return [line async for line in read_log(path, threads)]

    try:
        reading = [asyncio.create_task(read()) for _ in range(NUM_READERS)]
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 2.0) == "free"
        told = await asyncio.gather(*reading, return_exceptions=True)
        assert {type(each) for each in told} == {StorageAwayError}
        assert 0 < threads.num_hung < NUM_READERS / 2
    finally:
        writer = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        path.unlink()
        os.close(writer)
    while threads.num_hung:  # all who waited come back
        await asyncio.sleep(0.01)


async def test_the_last_lines_of_a_log_are_read(tmp_path: Path) -> None:
    path, threads = tmp_path / "job.log", FileThreads("logs")
    assert [line async for line in read_log(path, threads)] == []
    path.write_text("one\ntwo\nthree\nhalf of")
    assert [line async for line in read_log(path, threads, last_lines=2)] == ["two", "three"]
    followed = read_log(path, threads, last_lines=1, follow=True)
    assert await anext(followed) == "three"
    with path.open("a") as log:
        log.write(" a line\n")
    assert await anext(followed) == "half of a line"
