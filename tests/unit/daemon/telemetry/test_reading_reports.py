"""A node reports the data that it reads: the record goes when the read ends, also after an outage of etcd."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headway.daemon.errors import ConflictError, StoreUnreachableError
from headway.daemon.etcd.transaction import Compare, Delete, Put
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.records.format import encode
from headway.daemon.records.keys import Keys
from headway.daemon.records.measurements import ReadingRecord
from headway.daemon.records.records import SpecRecord
from headway.daemon.shards.library import Reading
from headway.daemon.telemetry import reports as telemetry_reports
from headway.daemon.telemetry.reports import ReadingReports
from headway.daemon.view.cluster_view import ClusterView

KEY = Keys.reading("j", "a")
LEASE = 7
DEADLINE_S = 20.0


class Etcd:
    """What is there, and by which lease. Each write may be lost before it is done, or its answer after."""

    def __init__(self) -> None:
        self.view = ClusterView()
        self.revision = 0
        self.is_away = False
        self.leases: dict[str, int] = {}
        self.answers_are_lost = False
        self._show(Keys.of("j", "spec"), encode(SpecRecord(spec=JobSpec(job=JobSection(name="j")))))

    async def transaction(self, conditions: Sequence[Compare], changes: Sequence[Put | Delete]) -> int:
        await asyncio.sleep(0)
        if self.is_away:
            raise StoreUnreachableError("etcd", "is away")
        if any(not self.view.revision_of(condition.key) for condition in conditions):
            raise ConflictError("j", "was removed")
        for change in changes:
            self._show(change.key, change.value if isinstance(change, Put) else None)
            if isinstance(change, Put):
                self.leases[change.key] = change.lease_id
        if self.answers_are_lost:
            raise StoreUnreachableError("etcd", "gave no answer")
        return self.revision

    def end_lease(self) -> None:
        """As when the node's process has died."""
        for key in [key for key, lease in self.leases.items() if lease == LEASE]:
            del self.leases[key]
            self._show(key, None)

    def _show(self, key: str, value: bytes | None) -> None:
        self.revision += 1
        self.view.apply(key, value, mod_revision=self.revision, create_revision=self.revision)

    @property
    def told(self) -> int | None:
        """Return the bytes that node a has read, by a reader's view; None: it reads nothing."""
        reading = self.view.jobs["j"].readings.get("a")
        return reading.num_bytes if reading is not None else None

    async def until(self, told: int | None) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while self.told != told:
                await asyncio.sleep(0.001)


@pytest.fixture
def etcd(monkeypatch: pytest.MonkeyPatch) -> Etcd:
    monkeypatch.setattr(telemetry_reports, "READING_PERIOD_S", 0.005)
    return Etcd()


@pytest.fixture
def library() -> Any:
    return SimpleNamespace(reading={"sha": Reading(10, 100)})


@pytest.fixture
def reports(etcd: Etcd, library: Any) -> ReadingReports:
    return ReadingReports(library, etcd.view, cast(Any, etcd), node="a", lease_id=lambda: LEASE)


async def test_what_is_read_is_told_and_taken_back(etcd: Etcd, reports: ReadingReports, library: Any) -> None:
    async with reports.telling("j", reports.of_data("sha")):
        await etcd.until(10)
        library.reading["sha"] = Reading(50, 100)
        await etcd.until(50)
    assert etcd.told is None


async def test_a_read_that_has_not_begun_hides_no_other(etcd: Etcd, reports: ReadingReports) -> None:
    """The data waits for a giver, and the model's folder is being read: the folder is told."""
    folder = ReadingRecord(num_bytes=7, total_bytes=9, url="hub")
    async with reports.telling("j", reports.of_data("nobody has it")), reports.telling("j", lambda: folder):
        await etcd.until(7)
    assert etcd.told is None


async def test_a_node_that_dies_between_its_writes_reads_nothing_any_more(etcd: Etcd, reports: ReadingReports) -> None:
    """It has told and not taken back: the record goes with the node's lease."""
    telling = asyncio.create_task(_tell_for_ever(reports))
    await etcd.until(10)
    etcd.is_away = True
    telling.cancel()
    await asyncio.wait({telling})
    assert etcd.told == 10
    etcd.end_lease()
    assert etcd.told is None


@pytest.mark.parametrize("answers_are_lost", [False, True])
async def test_what_could_not_be_taken_back_is_taken_back_later(
    etcd: Etcd, reports: ReadingReports, answers_are_lost: bool
) -> None:
    """etcd is away as the reading ends, or its answer to the first write was lost: nobody reads when it is back."""
    etcd.answers_are_lost = answers_are_lost
    ahead = asyncio.create_task(reports.run_ahead())
    async with reports.telling("j", reports.of_data("sha")):
        await etcd.until(10)
        etcd.is_away = True
    assert etcd.told == 10
    etcd.is_away = etcd.answers_are_lost = False
    await etcd.until(None)
    ahead.cancel()


async def test_what_is_left_of_an_earlier_reading_is_not_taken_from_a_new_one(
    etcd: Etcd, reports: ReadingReports, library: Any
) -> None:
    """etcd was away as the first reading ended, and the second is under way as it comes back."""
    async with reports.telling("j", reports.of_data("sha")):
        await etcd.until(10)
        etcd.is_away = True
    ahead = asyncio.create_task(reports.run_ahead())
    library.reading["sha"] = Reading(70, 100)
    async with reports.telling("j", reports.of_data("sha")):
        etcd.is_away = False
        await etcd.until(70)
        for _ in range(5):
            await asyncio.sleep(0.005)
            assert etcd.told == 70
    await etcd.until(None)
    ahead.cancel()


async def test_a_reading_that_tells_while_one_is_taken_back_is_taken_back_too(
    etcd: Etcd, reports: ReadingReports, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is deleted, the answer is slow, and the next reading tells meanwhile: that is taken back as well."""
    write, answers, is_slow = etcd.transaction, asyncio.Event(), asyncio.Event()

    async def slow(conditions: Sequence[Compare], changes: Sequence[Put | Delete]) -> int:
        revision = await write(conditions, changes)
        if isinstance(changes[0], Delete):
            is_slow.set()
            await answers.wait()
        return revision

    monkeypatch.setattr(etcd, "transaction", slow)
    first = asyncio.create_task(_tell_for_ever(reports))
    await etcd.until(10)
    first.cancel()
    await asyncio.wait_for(is_slow.wait(), DEADLINE_S)
    library.reading["sha"] = Reading(70, 100)
    async with reports.telling("j", reports.of_data("sha")):
        await etcd.until(70)
        answers.set()
        await asyncio.wait({first})
    assert etcd.told is None


async def _tell_for_ever(reports: ReadingReports) -> None:
    async with reports.telling("j", reports.of_data("sha")):
        await asyncio.Event().wait()
