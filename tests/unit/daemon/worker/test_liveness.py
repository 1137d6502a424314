"""When a worker counts as dead though its process is there. The clock is the test's."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from headway.daemon.client.nodes_file import parse_nodes
from headway.daemon.client.preview import preview
from headway.daemon.cluster.measurements import LayerTime
from headway.daemon.cluster.records import PlanRecord, WorkerPart
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.jobs.job_file import read_job_file
from headway.daemon.plan.cluster_plan import StageEstimate
from headway.daemon.worker.goal import (
    LOADING_S,
    RELEASE_S,
    Actual,
    Goal,
    Heartbeat,
    Preparation,
    Start,
    WorkerStatus,
    loading_s,
)
from headway.daemon.worker.liveness import (
    BUSY_SILENCE_S,
    FIRST_OPERATION_BATCHES,
    FIRST_OPERATION_S,
    HELLO_TIMEOUT_S,
    IDLE_SILENCE_S,
    MIN_STANDSTILL_S,
    PREPARING_STANDSTILL_S,
    SERVING_SILENCE_S,
    Liveness,
    StallWatch,
    launched_s,
)
from headway.stages.spec import ModelSpec, timed_kind
from headway.stages.stage.launched_ops import MOST_AHEAD

EXAMPLES = Path(__file__).resolve().parents[4] / "docs" / "examples"
SPEC = JobSpec(job=JobSection(name="j"))
ALONE = WorkerPart(node="a", node_incarnation="a-1", device_index=0, layers=("embed", "head"), depth=4)
PLAN = PlanRecord(generation=3, timeline=1, workers=(ALONE,))
GOAL = Goal(job="j", spec=SPEC)
PREPARE = msgspec.structs.replace(GOAL, prepare=Preparation(plan=PLAN, position=0))
START = msgspec.structs.replace(GOAL, start=Start(plan=PLAN, position=0))
WRITE = msgspec.structs.replace(START, stop_at=5, write=("head",))
IDLE = WorkerStatus(device_index=0, incarnation="w", pid=7, address="a:1")
PREPARED = replace(IDLE, goal=GOAL, actual=Actual(job="j", prepared=3))
RUNNING = replace(IDLE, goal=START, actual=Actual(job="j", prepared=3, generation=3))
STANDING = replace(RUNNING, actual=msgspec.structs.replace(RUNNING.actual, boundary=5))


def wants(status: WorkerStatus, goal: Goal) -> WorkerStatus:
    """The worker, which has another goal."""
    return replace(status, goal=goal)


def beat(
    num_operations: int,
    *,
    is_runnable: bool = True,
    typical_s: float = 0.1,
    expected_s: float | None = None,
    num_steps: int = 0,
    layers: dict[str, LayerTime] | None = None,
) -> Heartbeat:
    """A heartbeat in batch 12. expected_s: as any operation if None."""
    return Heartbeat(
        job="j",
        generation=3,
        operations=num_operations,
        runnable=is_runnable,
        typical_s=typical_s,
        batch=12,
        expected_s=typical_s if expected_s is None else expected_s,
        steps=num_steps,
        layers=layers or {},
    )


def first_complaint(
    liveness: Liveness, status: WorkerStatus, *, beats: Heartbeat | None = None, until_s: float
) -> float:
    """The second at which a worker is first complained of, asked every half second; -1: never."""
    for tick in range(int(until_s * 2) + 1):
        now = tick / 2
        if beats is not None and tick % 2 == 0:
            liveness.on_heartbeat(beats, now)
        if liveness.complaint(status, now):
            return now
    return -1.0


SLOW = msgspec.structs.replace(START, start=Start(plan=replace(PLAN, predicted_batch_seconds=100.0), position=0))
LATER = msgspec.structs.replace(START, prepare=Preparation(plan=replace(PLAN, generation=4), position=0))
TIMED = {"head": LayerTime(forward_s=0.1, backward_s=0.1)}


@pytest.mark.parametrize(
    ("status", "beats", "num_ahead", "limit_s"),
    [
        pytest.param(WorkerStatus(device_index=0), None, 0, HELLO_TIMEOUT_S, id="says no hello"),
        pytest.param(IDLE, None, 0, IDLE_SILENCE_S, id="silent while idle"),
        pytest.param(PREPARED, None, 0, SERVING_SILENCE_S, id="silent while prepared"),
        pytest.param(RUNNING, None, 0, SERVING_SILENCE_S, id="silent while it runs"),
        pytest.param(wants(PREPARED, START), None, 0, BUSY_SILENCE_S, id="silent while it loads"),
        pytest.param(RUNNING, beat(40), 0, MIN_STANDSTILL_S, id="stands still"),
        pytest.param(RUNNING, beat(40, typical_s=2.0), 0, 40.0, id="twenty times a slow operation's time"),
        pytest.param(RUNNING, beat(0, typical_s=0.0), 0, FIRST_OPERATION_S, id="the first operation may compile"),
        pytest.param(
            wants(RUNNING, SLOW),
            beat(0, typical_s=0.0),
            0,
            FIRST_OPERATION_S + FIRST_OPERATION_BATCHES * 100.0,
            id="the first operation of a plan whose batch takes 100 s",
        ),
        pytest.param(
            RUNNING, beat(40, typical_s=0.01, expected_s=0.0), 0, FIRST_OPERATION_S, id="the first update is like it"
        ),
        pytest.param(RUNNING, beat(80, typical_s=0.01, expected_s=2.0), 0, 40.0, id="twenty times the first update's"),
        pytest.param(
            RUNNING, beat(40, typical_s=0.01, layers=TIMED), MOST_AHEAD, FIRST_OPERATION_S, id="a card's layers untimed"
        ),
        pytest.param(wants(PREPARED, Goal()), beat(40), 0, RELEASE_S, id="does not let its job go"),
        pytest.param(wants(RUNNING, LATER), beat(40), 0, PREPARING_STANDSTILL_S, id="hangs and is to prepare"),
        pytest.param(RUNNING, replace(beat(40), generation=2), 0, -1.0, id="another generation's beats say nothing"),
    ],
)
def test_the_limit_follows_what_the_worker_does(
    status: WorkerStatus, beats: Heartbeat | None, num_ahead: int, limit_s: float
) -> None:
    """Nothing is heard from the start on, or the same heartbeat each second: the complaint comes at the limit."""
    found = first_complaint(Liveness(0.0, num_ahead=num_ahead), status, beats=beats, until_s=max(limit_s + 5, 60))
    assert found == limit_s


def test_a_long_update_that_progresses_is_no_standstill() -> None:
    """A new matrix every 4 s counts, although no operation ends for five minutes."""
    liveness = Liveness(0.0)
    for second in range(300):
        liveness.on_heartbeat(beat(40, typical_s=0.01, expected_s=0.0, num_steps=second // 4), float(second))
        assert liveness.complaint(RUNNING, float(second)) == ""


CARDS = [
    ("8b-8k", "8xh100"),
    ("8b-8k", "mixed-cards"),
    ("8b-2k", "mixed-cards"),
    ("large", "8xh100"),
    ("large", "nodes"),
]


@pytest.mark.parametrize("newton_schulz_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("job", "nodes"), CARDS)
def test_a_wait_for_all_that_was_launched_is_no_standstill(job: str, nodes: str, newton_schulz_dtype: str) -> None:
    """Launches take milliseconds; then one waits for the microbatches and the update that are launched before it.

    With the predicted times of the examples' plans that are up to 5.3 s, and twice as much is allowed for. A card that
    hangs is noticed all the same.
    """
    for worker, part in _predicted(job, nodes, newton_schulz_dtype):
        seconds = worker.seconds
        before_it_s = MOST_AHEAD * seconds.microbatch_s + seconds.update_s
        start = Start(plan=replace(PLAN, workers=(part,)), position=0)
        kinds = {timed_kind(layer, part.recompute) for layer in part.layers}
        share = 1 / len(part.layers)
        layer = LayerTime(forward_s=share * seconds.microbatch_s, backward_s=0.0, update_s=share * seconds.update_s)
        timed = dict.fromkeys(kinds, layer)
        assert launched_s(start, SPEC.train, timed, num_ahead=MOST_AHEAD) == pytest.approx(before_it_s)
        status = wants(RUNNING, msgspec.structs.replace(START, start=start))
        stands = beat(40, typical_s=0.01, layers=timed)
        found = first_complaint(Liveness(0.0, num_ahead=MOST_AHEAD), status, beats=stands, until_s=200)
        assert found >= 2.0 * before_it_s
        assert found <= MIN_STANDSTILL_S + 4.0 * before_it_s + 1.0


@pytest.mark.parametrize(
    ("launched", "limit_s"), [(None, BUSY_SILENCE_S), (0.0, BUSY_SILENCE_S), (0.5, 5.0), (6.9, 27.6)]
)
def test_a_worker_on_a_card_is_silent_while_its_allocator_waits(launched: float | None, limit_s: float) -> None:
    """It frees memory when all that was launched is done. Before the first heartbeat and the first times nobody knows
    how long that is; a worker on a CPU has nothing before it.
    """
    for num_ahead, expected_s in ((1, limit_s), (0, SERVING_SILENCE_S)):
        liveness = Liveness(0.0, num_ahead=num_ahead)
        if launched is not None:
            half = LayerTime(forward_s=launched / 2, backward_s=0.0)
            liveness.on_heartbeat(beat(40, layers={"embed": half, "head": half} if launched else None), 0.0)
        assert not liveness.complaint(RUNNING, expected_s - 0.1)
        assert "said nothing for" in liveness.complaint(RUNNING, expected_s)


def _predicted(job: str, nodes: str, newton_schulz_dtype: str) -> list[tuple[StageEstimate, WorkerPart]]:
    """The workers of an example's plan, with their parts."""
    spec = read_job_file(EXAMPLES / f"{job}.toml")[0]
    matrices = replace(spec.optim.matrices, newton_schulz_dtype=newton_schulz_dtype)  # type: ignore[arg-type]
    spec = replace(spec, optim=replace(spec.optim, matrices=matrices))
    found = parse_nodes((EXAMPLES / f"{nodes}.toml").read_text(), nodes)
    plan = preview(spec, found.records(spec.train), links=found.link_assumptions())[0]
    return [(worker, replace(ALONE, layers=worker.stage.layers)) for worker in plan.plan.estimates]


def test_progress_is_no_standstill() -> None:
    """One operation every 4 s, for two minutes."""
    liveness = Liveness(0.0)
    for second in range(120):
        liveness.on_heartbeat(beat(second // 4), float(second))
        assert liveness.complaint(RUNNING, float(second)) == ""


def test_a_worker_that_waits_for_a_neighbour_does_not_stand_still() -> None:
    """The time begins when an operation can run again."""
    liveness = Liveness(0.0)
    assert first_complaint(liveness, RUNNING, beats=beat(40, is_runnable=False), until_s=60) == -1.0
    for second in range(61, 66):
        liveness.on_heartbeat(beat(40), float(second))
        assert liveness.complaint(RUNNING, float(second)) == ""
    liveness.on_heartbeat(beat(40), 66.0)
    assert "stood still for 5 s in batch 12" in liveness.complaint(RUNNING, 66.0)


@pytest.mark.parametrize(("status", "goal"), [(PREPARED, START), (STANDING, WRITE)], ids=["start", "write"])
def test_loading_and_writing_have_their_own_time(status: WorkerStatus, goal: Goal) -> None:
    """Heartbeats come and no operation is done, until the worker is late for its goal."""
    found = first_complaint(Liveness(0.0), wants(status, goal), beats=beat(40), until_s=400)
    assert LOADING_S <= found < LOADING_S + 5.0


def test_a_worker_with_much_state_has_longer_to_load_and_to_write() -> None:
    """80 GB of state at 20 MB/s: the kill comes after that, and not after five minutes."""
    model = ModelSpec(num_hidden_layers=8, hidden_size=8192, intermediate_size=28672, num_attention_heads=64)
    job, layers = JobSpec(job=JobSection(name="j"), model=model), ("block.0", "block.1", "block.2", "block.3")
    small = loading_s(JobSpec(job=JobSection(name="j")), ("block.0",))
    assert LOADING_S < small < LOADING_S + 5.0
    assert loading_s(job, layers) > LOADING_S + 1000.0
    assert loading_s(job, layers) - LOADING_S == pytest.approx(4 * (loading_s(job, layers[:1]) - LOADING_S))


def test_a_worker_that_compiles_has_longer() -> None:
    """Prepare of a job that compiles: alive all the time, it is given ten minutes in place of two, and told so."""
    given: list[float] = []
    for compiles in (False, True):
        spec = replace(SPEC, train=replace(SPEC.train, compile=compiles))
        liveness, status = Liveness(0.0), wants(IDLE, msgspec.structs.replace(PREPARE, spec=spec))
        given.append(first_complaint(liveness, status, beats=beat(0), until_s=700))
    assert given == [120.0, 600.0]
    assert liveness.complaint(status, 600.0) == "did not prepare within 600 s"


def test_a_goal_that_was_reached_has_no_deadline_any_more() -> None:
    """It was started; five minutes later nobody complains."""
    liveness = Liveness(0.0)
    assert not liveness.complaint(wants(PREPARED, START), 0.0)
    for second in range(400):
        liveness.on_heartbeat(beat(second), float(second))
        assert liveness.complaint(RUNNING, float(second)) == ""


def test_a_daemon_that_was_stopped_blames_no_worker() -> None:
    """Stopped for an hour before a start: every clock restarts, and the worker keeps the rest of its time."""
    stalls, liveness = StallWatch(0.0), Liveness(0.0)
    status = wants(PREPARED, START)
    limit_s = loading_s(SPEC, ALONE.layers)
    assert liveness.complaint(status, 0.0) == ""
    assert stalls.tick(0.5) == 0.0
    assert stalls.tick(2.9) == 0.0
    stalled_s = stalls.tick(3600.0)
    assert stalled_s == pytest.approx(3596.6)
    liveness.on_watchdog_stall(stalled_s, 3600.0)
    assert liveness.complaint(status, 3600.0 + BUSY_SILENCE_S - 0.5) == ""
    assert "said nothing" in liveness.complaint(status, 3600.0 + BUSY_SILENCE_S)
    for second in range(3601, int(3596.6 + limit_s)):
        liveness.on_heartbeat(beat(0), float(second))
        assert liveness.complaint(status, float(second)) == ""
    late = 3597.0 + limit_s
    liveness.on_heartbeat(beat(0), late)
    assert f"did not start within {limit_s:g} s" in liveness.complaint(status, late)
