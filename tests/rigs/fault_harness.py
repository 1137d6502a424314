"""Where faults strike: a real cluster, a job, a fault at a named place, and the comparison with the undisturbed run.

A row of the fault matrix arms its fault, trains, and asks of the outcome: the fault has struck; the run went back and
on by itself; losses and final weights are the reference's, bit for bit; whoever was not hit kept its process; and the
history holds (tests/chaos/checker.py).
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headway.daemon.base import fault_points
from headway.daemon.base.errors import LeaseLostError
from headway.daemon.client.cluster_access import ClusterSession
from headway.daemon.client.job_requests import cancel, job_of, submit
from headway.daemon.client.job_watch import wait_for_phase
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import TERMINAL_PHASES, Phase
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import FaultSpec, JobSpec, PlacementSpec
from headway.daemon.local.cluster import LocalCluster
from tests.chaos.checker import FaultSeen, History, check
from tests.chaos.read_history import read_history
from tests.integration.exactness.training import (
    Oracle,
    Result,
    assert_same_bits,
    finished,
    small_job,
    until,
)
from tests.rigs.paces import pace_faults

TIMEOUT_S = 150.0
"""A few seconds on a quiet machine."""
ROW_S = 2 * TIMEOUT_S + 100
"""For a whole row, whose own deadlines say more."""
SNAPSHOT_EVERY = 4
LEASE_TTL_S = 2
HISTORY = "history"
LAYER_S = 0.005
"""Pace of the layers while something happens to a job: a third of a second a batch, so that it does not come too late.
"""

recoveries: dict[str, float] = {}
"""Seconds from the last strike to the first forward of a later generation, by job."""

Fault = dict[str, Any]
"""As in daemon/base/fault_points.py, without its id."""


def faulty_job(name: str, *, batches: int = 24, num_nodes: int = 3, fault: FaultSpec | None = None) -> JobSpec:
    """A job of about a second on so many nodes, with a snapshot every SNAPSHOT_EVERY batches.

    Its sequences are long enough for each of three nodes to have a stage: rows strike at the first, middle and last.
    """
    spec = small_job(name, batches=batches, sequence_length=128)
    return replace(
        spec,
        fault=fault or FaultSpec(snapshot_every=SNAPSHOT_EVERY, copies=2, checkpoint_every=0, link_timeout_s=20.0),
        placement=PlacementSpec(min_nodes=1, max_nodes=num_nodes, recut=False),
    )


def at_operation(stage: int, batch: int, *, do: str = "kill", op: str = "backward", **rest: Any) -> Fault:
    """Right after an operation in the middle of a batch, with frames in flight."""
    when = {"stage": stage, "batch": batch, "op": op}
    if op in ("forward", "backward"):
        when["microbatch"] = 3
    return {"at": "operation", "when": when, "do": do, **rest}


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of a job under faults."""

    spec: JobSpec
    job: JobView
    struck: list[dict[str, Any]]
    pids_before: dict[str, int]
    """Worker process by node, while the job ran undisturbed."""
    pids_after: dict[str, int]
    result: Result | None = None
    violations: list[str] = field(default_factory=list)

    @property
    def num_rollbacks(self) -> int:
        """How often the job went back to a boundary."""
        return sum("goes back to boundary " in event.text for event in self.job.events.values())

    def assert_exact(self, oracle: Oracle, *, strikes: int = 1, hit: frozenset[str] = frozenset()) -> None:
        """The promise. hit: nodes whose worker processes may be other ones now."""
        assert len(self.struck) >= strikes, f"only {len(self.struck)} of {strikes} faults struck"
        assert self.result is not None
        assert_same_bits(self.result, oracle(self.spec))
        assert not self.violations, "\n".join(self.violations)
        changed = {node for node, pid in self.pids_before.items() if self.pids_after.get(node, pid) != pid}
        assert changed <= hit, f"workers of {sorted(changed - hit)} were replaced, though nothing hit them"


class FaultHarness:
    """A cluster with a faults file; one job at a time."""

    def __init__(
        self, cluster: LocalCluster, session: ClusterSession, faults: Path, folder: Path, *, layer_s: float = 0.0
    ) -> None:
        self.cluster = cluster
        self.session = session
        self.faults = faults
        self.history_folder = folder / HISTORY
        self._folder = folder
        self._num_faults = self._armed_after = 0
        self._lines: list[str] = []
        self._layer_s = self._pace_s = layer_s
        if layer_s:
            self.set_pace(layer_s)

    def arm(self, *faults: Fault) -> None:
        """These faults, and no other, from now on. `after`: the position of one of them that must strike before."""
        self._armed_after, first = self._num_faults, self._num_faults + 1
        self._num_faults += len(faults)
        self._lines = []
        for number, fault in enumerate(faults, first):
            waits = {"after": f"{first + fault['after']:04d}"} if "after" in fault else {}
            self._lines.append(json.dumps({"id": f"{number:04d}", **fault, **waits}))
        self.set_pace(self._pace_s)

    def set_pace(self, layer_s: float) -> None:
        """The least seconds of a layer's forward from now on, in stages that begin while there is a pace. 0: none."""
        self._pace_s = layer_s
        draft = self.faults.with_suffix(".draft")
        draft.write_text("\n".join([*map(json.dumps, pace_faults(layer_s)), *self._lines]))
        draft.replace(self.faults)

    def struck(self, *, after: int = 0) -> list[dict[str, Any]]:
        """The notes of faults that have struck, of those armed after the first `after`."""
        folder = self.faults.with_name(f"{self.faults.name}.struck")
        texts = [path.read_text() for path in sorted(folder.glob("*.*"))] if folder.is_dir() else []
        notes = [json.loads(text) for text in texts if text.endswith("\n")]  # the others are being written
        return [note for note in notes if int(note["id"]) > after]

    async def until_struck(self) -> dict[str, Any]:
        """The note of the newest strike, as soon as one of the armed faults has struck."""
        async with asyncio.timeout(TIMEOUT_S):
            while not (notes := self.struck(after=self._armed_after)):
                await asyncio.sleep(0.02)
        return notes[-1]

    async def train(
        self,
        spec: JobSpec,
        *faults: Fault,
        during: Callable[[], Awaitable[None]] | None = None,
        expect: Phase = Phase.FINISHED,
        timeout_s: float = TIMEOUT_S,
    ) -> Outcome:
        """Submit, let the faults strike, wait for the end. during: runs beside the training, which is paced as long."""
        armed_before = self._num_faults
        self.arm(*faults)
        if during is not None:
            self.set_pace(max(LAYER_S, self._layer_s))
        await submit(self.session, spec)
        return await self.wait(spec, during=during, expect=expect, armed_before=armed_before, timeout_s=timeout_s)

    async def wait(
        self,
        spec: JobSpec,
        *,
        during: Callable[[], Awaitable[None]] | None = None,
        expect: Phase = Phase.FINISHED,
        armed_before: int | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Outcome:
        """Wait for the end of a job that was submitted, or resumed, before."""
        name = spec.job.name
        armed_before = self._num_faults if armed_before is None else armed_before
        task: asyncio.Future[None] | None = None
        try:
            start_s = max(TIMEOUT_S, timeout_s)
            running = await wait_for_phase(self.session, name, frozenset({Phase.RUNNING}), timeout_s=start_s)
            before = _worker_pids(running)
            task = asyncio.ensure_future(self._meanwhile(during)) if during is not None else None
            job = await wait_for_phase(self.session, name, frozenset({expect}), timeout_s=timeout_s)
            assert job.phase.phase is expect, f"{job.phase.phase}: {job.phase.reason}\n{job.phase.error}"
            if task is not None:
                await asyncio.wait_for(task, TIMEOUT_S)
        except BaseException:
            await self._clear(name)
            raise
        finally:
            if task is not None:
                task.cancel()
            self._rest()
        result = None
        if expect is Phase.FINISHED:
            out = self._folder / name
            out.mkdir()
            result = await finished(self.session, name, out)
        struck = self.struck(after=armed_before)
        history = self.history(spec, struck)
        if expect is Phase.FINISHED and any(note.get("phase") == Phase.FINISHED for note in struck):
            history = replace(history, ended_at=time.monotonic())  # whoever struck at the end has nothing to wait for
        if (seconds := _seconds_to_recover(history)) is not None:
            recoveries[name] = seconds
        return Outcome(
            spec=spec,
            job=job_of(await self.session.view(), name),
            struck=struck,
            pids_before=before,
            pids_after=_worker_pids(job),
            result=result,
            violations=_violations(history, spec),
        )

    async def _meanwhile(self, during: Callable[[], Awaitable[None]]) -> None:
        """What happens to a job; then its layers are as fast again as they can be."""
        try:
            await during()
        finally:
            self.set_pace(self._layer_s)

    def _rest(self) -> None:
        """No fault is armed, and layers have the cluster's own pace."""
        self._pace_s = self._layer_s
        self.arm()

    def history(self, spec: JobSpec, struck: list[dict[str, Any]]) -> History:
        """What daemons and workers, also those of nodes that are gone, wrote down about a job."""
        history = read_history(self.history_folder, job=spec.job.name)
        faults = [FaultSeen(text=str(note), at=note["monotonic"], until=note["monotonic"]) for note in struck]
        return replace(history, faults=faults)

    async def _clear(self, name: str) -> None:
        """A row that failed leaves its nodes to the next one."""
        self._rest()
        if job_of(await self.session.view(), name).phase.phase not in TERMINAL_PHASES:
            await cancel(self.session, name)
            await wait_for_phase(self.session, name, TERMINAL_PHASES, timeout_s=TIMEOUT_S)

    async def until(
        self, condition: Callable[[ClusterView, JobView], bool], name: str, *, timeout_s: float = TIMEOUT_S
    ) -> JobView:
        """Wait until something is true of a job."""
        return await until(self.session, condition, name, timeout_s=timeout_s)

    async def until_batch(self, name: str, batch: int, *, timeout_s: float = TIMEOUT_S) -> JobView:
        """Wait until a batch is known to be done."""

        def has_come(_: ClusterView, job: JobView) -> bool:
            return job.progress is not None and job.progress.batch >= batch

        return await self.until(has_come, name, timeout_s=timeout_s)

    async def leader_among(self, nodes: Collection[str]) -> str:
        """The leading node, after elections until it is one of these."""
        async with asyncio.timeout(TIMEOUT_S):
            while (leader := (await self.session.view()).leader) is None or leader.node not in nodes:
                found = await self.session.client.get(Keys.LEADER)
                if leader is not None and found is not None and found.lease_id:
                    with suppress(LeaseLostError):
                        await self.session.client.revoke_lease(found.lease_id)
                await asyncio.sleep(0.1)
        return leader.node

    async def all_nodes_up(self, count: int) -> None:
        """Wait until so many nodes are registered with living workers."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                view = await self.session.view()
                if sum(not node.down_devices for node in view.nodes.values()) >= count:
                    return
                await asyncio.sleep(0.1)


def _violations(history: History, spec: JobSpec) -> list[str]:
    """What the checker finds; a history that is not there holds nothing."""
    if not history.plans or not history.operations:
        return [f"no history: {len(history.plans)} plans, {len(history.operations)} operations"]
    return list(check(history, spec))


def _seconds_to_recover(history: History) -> float | None:
    """From the last strike to the first forward of a generation that began after it; None: there was none."""
    if not history.faults:
        return None
    struck_at = max(fault.at for fault in history.faults)
    newest = max((o.generation for o in history.operations if o.started < struck_at), default=0)
    after = [o.started for o in history.operations if o.generation > newest and o.op == "forward"]
    return min(after) - struck_at if after else None


def _worker_pids(job: JobView) -> dict[str, int]:
    if job.plan is None:
        records = list(job.workers.values())
    else:
        records = list(job.workers_of(job.plan).values())
    return {record.node: record.pid for record in records}


@asynccontextmanager
async def fault_harness(
    folder: Path, *, num_nodes: int, kind: type[LocalCluster] = LocalCluster, layer_s: float = 0.0, **settings: Any
) -> AsyncIterator[FaultHarness]:
    """A cluster whose processes look out for faults.

    layer_s: least seconds of a layer's forward; a batch then takes as long on any machine. settings: of every daemon.
    """
    faults = folder / "faults"
    settings = {"quarantine_after": 0, "lease_ttl_s": LEASE_TTL_S, "history_dir": folder / HISTORY} | settings
    async with (
        kind(
            folder / "state",
            num_nodes=num_nodes,
            node_settings=settings,
            environment={fault_points.ENVIRONMENT: str(faults)},
        ) as cluster,
        ClusterSession(cluster.address) as session,
    ):
        yield FaultHarness(cluster, session, faults, folder, layer_s=layer_s)
