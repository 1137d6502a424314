"""What a daemon answers: who may call what, logs on a file system that may hang, which jobs have metrics."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

from headway.daemon.base.errors import StorageAwayError
from headway.daemon.blobs.file_threads import FileThreads
from headway.daemon.cluster.records import Phase, PhaseRecord
from headway.daemon.decide.job_view import JobView
from headway.daemon.node.metrics import MOST_JOBS, told_of
from headway.daemon.node.service import read_log
from headway.daemon.node.stream_limits import CALLERS, refusal, revocation
from headway.proto import control_pb2
from headway.stages.sockets.roles import ROLE_URI


def test_every_method_has_its_callers() -> None:
    """A method of the two services that the table forgets could be called by nobody; a name too many, by mistake."""
    methods = {method.name for method in control_pb2.DESCRIPTOR.services_by_name["Node"].methods}
    assert CALLERS.keys() == methods | {"Read"}
    assert all(CALLERS.values())


def test_a_refusal_names_the_certificate_and_who_may() -> None:
    """A reader gives no data, a node neither; a certificate without a role does all; an unknown method is nobody's."""
    words = "GiveData is refused: the certificate is of {}, and only operator may call it"
    assert refusal("GiveData", ["ann", f"{ROLE_URI}reader"]) == words.format("ann (reader)")
    assert refusal("GiveData", ["a", f"{ROLE_URI}node"]) == words.format("a (node)")
    assert not refusal("GiveData", ["me", f"{ROLE_URI}operator"])
    assert not any(refusal(method, ["old"]) for method in CALLERS)
    assert refusal("Status", ["a", f"{ROLE_URI}king"])
    assert "nobody" in refusal("Format", ["old"])


def test_a_revoked_name_counts_nowhere_in_a_certificate() -> None:
    """In any case of letters; another name, and one that is only a part, stay as they are."""
    assert revocation(["A", "localhost", f"{ROLE_URI}node"], {"a"}) == "the certificate of A is revoked"
    assert revocation(["x", "a"], {"a"})
    assert not revocation(["ab", f"{ROLE_URI}node"], {"a"})
    assert not revocation(["a"], ())


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


def test_jobs_that_run_and_the_newest_of_the_others_have_metrics() -> None:
    """Ten times as many jobs as fit, the oldest still running: their number as labels stays what it is."""
    jobs = [JobView(name=f"job-{number}", phase=PhaseRecord(phase=Phase.FINISHED)) for number in range(10 * MOST_JOBS)]
    jobs[0] = replace(jobs[0], phase=PhaseRecord(phase=Phase.RUNNING))
    told = told_of(jobs)
    assert [told[0].name, told[-1].name, len(told)] == ["job-0", f"job-{10 * MOST_JOBS - 1}", MOST_JOBS]
