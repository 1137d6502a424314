"""What viewers of `headway web` see: one cluster and its jobs, followed once for all who look.

They get the newest state, in parts: whoever reads slowly misses states in between, and nothing waits in a queue.
"""

import asyncio
import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import attrgetter, is_not
from typing import Any, Final, NoReturn

import msgspec

from headway.daemon.base.errors import ConfigError, RecoveryError, StoreError, in_one_line
from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.doctor_outcome import LEADERLESS, OF_ETCD, advice_on, outcome_of, plain
from headway.daemon.client.job_picture import traced
from headway.daemon.client.job_watch import HistoryReader
from headway.daemon.client.node_requests import report_shares
from headway.daemon.cluster.client import EtcdStatus
from headway.daemon.cluster.records import TERMINAL_PHASES
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.reports.cluster_picture import MOST_TROUBLES, Trouble, job_row, link_rows, node_rows, troubles
from headway.daemon.reports.job_report import places_in, report_in
from headway.daemon.reports.metrics_file import HistoryRow, rates
from headway.daemon.reports.picture import picture_of, telling_rows
from headway.daemon.reports.safety_report import cost_of_loss, safety_lines
from headway.stages.errors import PeerError

BEAT_S: Final = 15.0
"""Something is sent at least so often, so that both sides notice a connection that is dead."""
PAUSE_S: Final = 0.5
"""Least time between two states that viewers get."""
LEAST_REST: Final = 150.0
"""A state that took a second to make is the last one for so many seconds: so pages take less than 1 % of a core."""
MEMBERS_EVERY_S: Final = 10.0
PICTURE_EVERY_S: Final = 60.0
"""A job is drawn anew so often, for what its rows do not tell; a change of plan is drawn at once."""
MOST_ROWS: Final = 40_000
"""Rows of a job that are kept. Of more those stay that tell something, as many of each part of the job."""
NUM_STRETCHES: Final = 1000
"""Stretches of a job of which the telling rows stay, 14 of each at most: so thinning always makes room."""
MOST_LAST_ASKED: Final = 5
END: Final = sys.maxsize


def event(name: str, value: object) -> bytes:
    """Return a server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(value))


class Viewer:
    """One page that looks: what it has not got yet. The newest of each part replaces the one before."""

    def __init__(self, parts: Mapping[str, bytes]) -> None:
        self.rows_to = END
        """Newest batch that it has as it is now."""
        self._unsent = dict(parts)
        self._has_news = asyncio.Event()
        self._has_news.set()

    def tell(self, part: str = "", event: bytes = b"") -> None:
        """Note the newest event of a part; without one: rows have changed."""
        if part:
            self._unsent[part] = event
        self._has_news.set()

    async def next(self) -> bytes:
        """Return what it has not got; empty after a while without news."""
        with suppress(TimeoutError):
            async with asyncio.timeout(BEAT_S):
                await self._has_news.wait()
        self._has_news.clear()
        events, self._unsent = b"".join(self._unsent.values()), {}
        return events


class Topic:
    """The newest state of one subject as events, one for each of its parts, and those who look at it."""

    def __init__(self) -> None:
        self._parts: dict[str, bytes] = {}
        self.viewers: set[Viewer] = set()

    def tell(self, part: str, value: object) -> None:
        """Tell everybody a part, if it has changed."""
        told = event(part, value)
        if self._parts.get(part) != told:
            self._parts[part] = told
            for viewer in self.viewers:
                viewer.tell(part, told)

    @contextmanager
    def viewer(self) -> Iterator[Viewer]:
        """Add someone who looks, until this context ends."""
        viewer = Viewer(self._parts)
        self.viewers.add(viewer)
        try:
            yield viewer
        finally:
            self.viewers.discard(viewer)


@dataclass(frozen=True, slots=True)
class MemberRow:
    """A member of etcd."""

    address: str
    trouble: str
    status: EtcdStatus | None = None
    """What it tells of itself; None: nothing."""


class ClusterFollower:
    """Follows one cluster, and makes the state that its viewers get."""

    def __init__(self, session: ClusterSession, view: ClusterView) -> None:
        self.topic = Topic()
        self.session = session
        self.view = view
        self.bells: set[asyncio.Event] = set()
        """Are set at every change."""
        self._made_at = -PAUSE_S
        self._away: StoreError | None = None
        """Why etcd does not answer; None: it does."""
        self._members: tuple[MemberRow, ...] = ()
        self._remarks: tuple[Trouble, ...] = ()
        """That etcd is full, that this person's certificate ends."""
        self._inputs: tuple[object, ...] = ()
        """Records from which the newest nodes and links were made; replaced, never changed."""

    async def run(self) -> NoReturn:
        """Follow until cancelled. An etcd that goes away, or refuses, is told of and followed again."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow())
            tasks.create_task(self._ask_members())
            tasks.create_task(self._tell())
        raise AssertionError("a cluster is followed for ever")

    @contextmanager
    def viewer(self) -> Iterator[Viewer]:
        """Add someone who looks; the first one gets a state that is not older."""
        if not self.topic.viewers and time.monotonic() >= self._made_at + PAUSE_S:
            self._publish()
        with self.topic.viewer() as viewer:
            yield viewer

    async def _follow(self) -> NoReturn:
        while True:
            try:
                async for view in self.session.follow(on_away=self._note_away):
                    self.view, self._away = view, None
                    self._ring()
            except StoreError as error:
                self._note_away(error)
                await asyncio.sleep(PAUSE_S)

    def _note_away(self, error: StoreError) -> None:
        self._away = error
        self._ring()

    def _ring(self) -> None:
        for bell in self.bells:
            bell.set()

    async def after_changes(self) -> AsyncIterator[None]:
        """Yield now and after changes, with rests that grow with the time for which the reader keeps this waiting."""
        bell = asyncio.Event()
        self.bells.add(bell)
        try:
            while True:
                bell.clear()
                began = time.thread_time()
                yield
                await asyncio.sleep(max(PAUSE_S, LEAST_REST * (time.thread_time() - began)))
                await bell.wait()
        finally:
            self.bells.discard(bell)

    async def _ask_members(self) -> NoReturn:
        """Ask each member of etcd how it is, from time to time."""
        address = self.session.address
        async with AsyncExitStack() as stack:
            sessions = [
                await stack.enter_async_context(ClusterSession(replace(address, etcd=(member,))))
                for member in address.etcd
            ]
            while True:
                self._members = tuple(await asyncio.gather(*map(_ask, sessions)))
                remarks = {"your certificate": "", "etcd": ""}
                with suppress(ConfigError, StoreError):  # a renewal goes on; it is away, which is told
                    remarks["your certificate"] = address.certificate_end()
                    remarks["etcd"] = await self.session.why_full()
                self._remarks = tuple(Trouble(about=what, sentence=line) for what, line in remarks.items() if line)
                self._ring()
                await asyncio.sleep(MEMBERS_EVERY_S)

    async def _tell(self) -> None:
        async for _ in self.after_changes():
            if self.topic.viewers:
                self._publish()

    def _publish(self) -> None:
        """Make each part of the present state; a fault in one is told, and the others stay new.

        Nodes and links follow from fewer records than jobs, which change all the time.
        """
        self._made_at, faults = time.monotonic(), list[Trouble]()

        def made(about: str, make: Callable[[], Any]) -> list[Any]:
            try:
                return [make()]
            except Exception as error:  # anybody may have written a record that cannot be drawn
                faults.append(Trouble(about=about, sentence=in_one_line(error), advice="`headway doctor` tells more"))
                return []

        def tell(name: str, make: Callable[[], object]) -> None:
            for part in made(f"the list of {name}", make):
                self.topic.tell(name, part)

        view = self.view
        jobs = view.jobs_in_order()
        (places,) = made("the queue", partial(places_in, view)) or [{}]
        reports = [report for job in jobs for report in made(f"job {job.name}", partial(report_in, view, job, places))]
        tell("jobs", lambda: [job_row(report) for report in reports])
        tell("users", lambda: report_shares(view))
        tell("members", lambda: self._members)
        inputs = (view.nodes, view.failures, view.probes, view.reach, view.leader, *(job.plan for job in jobs))
        if len(inputs) != len(self._inputs) or any(map(is_not, inputs, self._inputs)):
            num_before = len(faults)
            tell("nodes", lambda: node_rows(view))
            tell("links", lambda: link_rows(view))
            self._inputs = inputs if len(faults) == num_before else ()  # a fault is told until it is mended
        for of_records in made("this page", lambda: troubles(view, reports)):
            faults += of_records
        found = [*self._own_troubles(), *faults]
        about = {"etcd": self.session.client.target, "leader": view.leader.node if view.leader else ""}
        self.topic.tell("about", about | {"num_troubles": len(found), "troubles": found[:MOST_TROUBLES]})

    def _own_troubles(self) -> Iterator[Trouble]:
        """Yield what is wrong with etcd, and with this person's certificate."""
        of_members = [(f"etcd at {each.address}", each.trouble) for each in self._members]
        away = [(self._away.target, self._away.reason)] if self._away is not None else []
        for about, reason in away or of_members:
            if reason and (away or len(of_members) > 1):  # what a single one says is seen sooner
                yield Trouble(about=about, sentence=plain(reason), advice=advice_on([outcome_of(reason)], OF_ETCD))
        yield from self._remarks


async def _ask(session: ClusterSession) -> MemberRow:
    (address,) = session.address.etcd
    try:
        told = await session.client.status()
    except StoreError as error:
        return MemberRow(address, plain(error.reason))
    return MemberRow(address, "" if told.has_leader else LEADERLESS, told)


class JobFollower:
    """Follows one job for all who look at it: its picture, and the rows that came since."""

    def __init__(self, cluster: ClusterFollower, name: str) -> None:
        self.topic = Topic()
        self._cluster = cluster
        self._name = name
        self._rows: list[HistoryRow] = []
        """Final ones, and behind them those that a failure may undo; rising."""
        self._final_to = -1
        self._num_last_asked = 0
        """Times that nodes were asked for the last rows of a job that is over."""
        self._drawn_to = END
        """Newest batch that the newest picture has as it is now; END: there is no picture."""
        self._mark: object = None
        """What the newest picture was drawn of."""
        self._drawn_at = 0.0

    async def run(self) -> None:
        """Follow until cancelled."""
        reader: HistoryReader | None = None
        try:
            async for _ in self._cluster.after_changes():
                view = self._cluster.view
                job = view.jobs.get(self._name)
                if job is None or job.spec is None:
                    continue
                try:
                    reader = reader or HistoryReader(self._cluster.session, self._name)
                    await self._read(reader, view, job)
                    self._tell(view, job)
                    await self._draw(view, job)
                except Exception as error:  # anybody may have written a record that cannot be drawn
                    trouble = Trouble(about=f"job {self._name}", sentence=in_one_line(error))
                    self.topic.tell("now", {"cost": "", "safety": (), "troubles": [trouble]})
        finally:
            if reader is not None:
                await reader.close()

    @contextmanager
    def viewer(self) -> Iterator[Viewer]:
        """Add someone who looks."""
        with self.topic.viewer() as viewer:
            viewer.rows_to = self._drawn_to
            yield viewer

    def unsent_rows(self, viewer: Viewer) -> bytes:
        """Return the rows that a viewer does not have as they are now."""
        rows = self._rows[bisect_right(self._rows, viewer.rows_to, key=_BATCH) :]
        if not rows:
            return b""
        viewer.rows_to = rows[-1].batch
        return event("rows", rows)

    async def _read(self, reader: HistoryReader, view: ClusterView, job: JobView) -> None:
        """Take the rows that became final, and those of the newest progress."""
        assert job.spec is not None
        found: list[HistoryRow] = []
        with suppress(PeerError, RecoveryError, TimeoutError):  # asked again after the next change, for what is missing
            async for row in reader.new_rows(view, job):
                found.append(row)
                _thin(found)
            last = job.checkpoint.boundary if job.checkpoint is not None else 0
            if (
                job.phase.phase in TERMINAL_PHASES
                and reader.next_batch < last
                and self._num_last_asked < MOST_LAST_ASKED
            ):
                self._num_last_asked += 1  # a daemon may not know yet that the job has ended
                async for row in reader.rows(view):
                    found.append(row)
        if found:
            self._put(found, until=found[-1].batch)
        self._final_to = max(self._final_to, reader.next_batch - 1)
        if job.progress is not None and job.phase.phase not in TERMINAL_PHASES:
            rate, generation = rates(job.spec), job.progress.generation
            recent = (*job.progress.recent, (job.progress.batch, job.progress.loss))
            fresh = [
                HistoryRow(batch=b, loss=loss, learning_rate=rate(b), tokens=0, seconds=0.0, generation=generation)
                for b, loss in sorted(dict(recent).items())
                if b > self._final_to
            ]
            if fresh and fresh != self._rows[bisect_left(self._rows, fresh[0].batch, key=_BATCH) :]:
                self._put(fresh, until=END)
        _thin(self._rows)

    def _put(self, rows: Sequence[HistoryRow], *, until: int) -> None:
        """Replace what is known from the first of these batches up to another one."""
        first = rows[0].batch
        begin, end = (
            bisect(self._rows, at, key=_BATCH) for bisect, at in ((bisect_left, first), (bisect_right, until))
        )
        self._rows[begin:end] = rows
        self._drawn_to = min(self._drawn_to, first - 1) if self._drawn_to != END else END
        for viewer in self.topic.viewers:
            viewer.rows_to = min(viewer.rows_to, first - 1) if viewer.rows_to != END else END
            viewer.tell()

    def _tell(self, view: ClusterView, job: JobView) -> None:
        report = report_in(view, job)
        self.topic.tell("report", report)
        own = [each for each in troubles(view, [report]) if each.about == f"job {self._name}"]
        self.topic.tell(
            "now", {"cost": cost_of_loss(report.safety), "safety": safety_lines(report.safety), "troubles": own}
        )
        self.topic.tell("links", [row for row in link_rows(view) if self._name in row.jobs])

    async def _draw(self, view: ClusterView, job: JobView) -> None:
        """Draw the job if its plan or its events have changed, or after a while."""
        mark = (job.phase.phase, job.phase.num_events, job.plan)
        if mark == self._mark and time.monotonic() < self._drawn_at + PICTURE_EVERY_S:
            return
        pipeline, why = await traced(self._cluster.session, self._name)
        picture = picture_of(job, view.nodes, self._rows, now_s=time.time(), pipeline=pipeline, why_no_pipeline=why)
        self._mark, self._drawn_at = mark, time.monotonic()
        self._drawn_to = self._rows[-1].batch if self._rows else -1
        for viewer in self.topic.viewers:
            viewer.rows_to = self._drawn_to
        self.topic.tell("picture", picture)


def _thin(rows: list[HistoryRow]) -> None:
    """Keep of too many rows those that a curve can show, as a report does: old batches as densely as new ones."""
    if len(rows) > MOST_ROWS:
        width = -(-(rows[-1].batch + 1) // NUM_STRETCHES)
        stretches = groupby(rows, key=lambda row: row.batch // width)
        rows[:] = [row for _, stretch in stretches for row in telling_rows(list(stretch))]


_BATCH: Final = attrgetter("batch")
