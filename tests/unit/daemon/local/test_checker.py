"""Every rule, broken once in an otherwise sound history, is told, and by its own sentence only."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.chaos.checker import RULES, Bounds, FaultSeen, History, Load, Operation, Sample, check, owners
from tests.rigs.histories import JOB, PLANS, changed, sound_history


def test_a_sound_history_breaks_no_rule() -> None:
    """Three plans with a rollback and a planned change between them: nothing to tell."""
    assert check(sound_history(), JOB) == ()


def test_a_batch_belongs_to_the_last_plan_that_began_before_it() -> None:
    """Boundaries 0, 2, 4 of generations 1, 3, 4: two batches each are in the final weights."""
    assert [plan and plan.generation for plan in owners(PLANS, 6)] == [1, 1, 3, 3, 4, 4]


def again(operation: Operation) -> list[Operation]:
    return [operation, replace(operation, started=operation.started + 0.001)]


def never(_: Operation) -> list[Operation]:
    return []


def _plan(generation: int, **fields: object) -> Callable[[History], History]:
    def change(history: History) -> History:
        plans = [replace(p, **fields) if p.generation == generation else p for p in history.plans]  # type: ignore[arg-type]
        return replace(history, plans=plans)

    return change


def _operation(*key: object, **fields: object) -> Callable[[History], History]:
    return lambda history: changed(history, key, lambda o: replace(o, **fields))  # type: ignore[arg-type]


def _repeated(*key: object) -> Callable[[History], History]:
    return lambda history: changed(history, key, again)  # type: ignore[arg-type]


def _repeated_by(*key: object, worker: int) -> Callable[[History], History]:
    return lambda history: changed(history, key, lambda o: [o, replace(o, worker=worker)])  # type: ignore[arg-type]


def _lost(*key: object) -> Callable[[History], History]:
    return lambda history: changed(history, key, never)  # type: ignore[arg-type]


def _unknown_plan(history: History) -> History:
    stray = replace(history.operations[0], generation=2, process="")
    return replace(history, operations=[*history.operations, stray])


def _late_operation(history: History) -> History:
    """A rolled back operation (it counts nowhere) that its process did after it had begun a later generation."""
    return changed(history, (1, 0, "backward", 3, 1), lambda o: replace(o, started=32.5))


def _samples(*amounts: int, what: str = "fds") -> Callable[[History], History]:
    samples = [Sample(at=float(at), subject="worker 7", amounts={what: n}) for at, n in enumerate(amounts)]
    return lambda history: replace(history, samples=samples)


def _faults(*faults: tuple[float, float]) -> Callable[[History], History]:
    seen = [FaultSeen(text=f"fault {n}", at=at, until=until) for n, (at, until) in enumerate(faults)]
    return lambda history: replace(history, faults=seen)


def _loaded(source: str, **fields: int) -> Callable[[History], History]:
    """Generation 3 went back to boundary 2 of timeline 1."""
    load = Load(generation=3, layer="embed", boundary=2, source="path", source_timeline=1)
    wrong = replace(load, source=source, **fields)  # type: ignore[arg-type]
    return lambda history: replace(history, loads=[wrong])


BREACHES = {
    "a layer of another boundary": (_loaded("path", boundary=3), "loaded at boundary 3"),
    "a layer of another timeline": (_loaded("path", source_timeline=3), "loaded of timeline 3"),
    "a live layer after a rollback": (_loaded("live"), "continued with live layers"),
    "a plan that was never in force": (_unknown_plan, "no such plan"),
    "a worker that the plan does not have": (_operation(4, 1, "update", 5, None, worker=7), "does not have"),
    "a batch before the plan's boundary": (_operation(3, 0, "update", 2, None, batch=1, version=1), "began at bound"),
    "a timeline taken up again": (_plan(4, timeline=1, ancestry=()), "went back to timeline 1"),
    "a boundary that was rolled back": (_plan(4, timeline=4, source_timeline=1), "not in the past"),
    "an ancestry that hides the rollback": (_plan(3, ancestry=()), "ancestry ends with nothing"),
    "a rollback on the same timeline": (_plan(3, timeline=1), "was made 2 times"),
    "an update done twice": (_repeated(4, 1, "update", 5, None), "head: version 6 was made 2 times"),
    "a forward that is not late": (_operation(4, 1, "forward", 5, 0, version=5), "read version 5, not 4"),
    "a forward that is too late after a recovery": (_operation(3, 0, "forward", 2, 1, version=0), "version 0, not 1"),
    "an update of another version": (_operation(1, 0, "update", 1, None, version=0), "read version 0, not 1"),
    "a backward on another version": (_operation(4, 0, "backward", 5, 0, version=5), "its forward on version 4"),
    "a backward without its forward": (_lost(1, 1, "forward", 3, 1), "no forward of it"),
    "a microbatch counted twice": (_repeated(3, 2, "backward", 3, 1), "stage 2, backward of batch 3, microbatch 1: c"),
    "a microbatch not counted": (_lost(4, 0, "backward", 4, 1), "counts 0 times"),
    "an update that is missing": (_lost(3, 1, "update", 3, None), "stage 1, update of batch 3: counts 0 times"),
    "an input from nowhere": (_operation(4, 1, "forward", 4, 0, started=43.9), "before stage 0 of its own"),
    "a gradient from nowhere": (
        _operation(4, 0, "backward", 4, 0, started=44.021),
        "before stage 1 (replica 1 of 2) of its own",
    ),
    "a microbatch on a replica that does not hold its group": (
        _repeated_by(4, 1, "forward", 4, 0, worker=2),
        "stage 1 (replica 2 of 2), forward of batch 4, microbatch 0: counts 1 times",
    ),
    "a backward by another replica than the forward": (
        _operation(4, 2, "backward", 4, 1, worker=1),
        "stage 1 (replica 1 of 2), backward of batch 4, microbatch 1: there was no forward",
    ),
    "an update that one replica leaves out": (
        _lost(4, 2, "update", 4, None),
        "stage 1 (replica 2 of 2), update of batch 4: counts 0 times",
    ),
    "an update without another replica's sums": (
        _operation(4, 1, "update", 4, None, started=44.2),
        "stage 1 (replica 1 of 2), update of batch 4: ran before stage 1 (replica 2 of 2) could have sent its sums",
    ),
    "an old generation in a process of a newer one": (_late_operation, "worker node-1 had begun generation 3"),
    "no progress after a fault": (_faults((45.95, 47.0)), "no operation followed it"),
    "slow progress after a fault": (_faults((13.95, 14.0)), "18.9 s passed"),
    "three versions alive": (_operation(4, 1, "forward", 5, 0, versions_live=3), "3 weight versions"),
    "too many files open": (_samples(10, 600, 10), "600 fds, more than 512"),
    "files that are never closed": (_samples(*range(10, 410, 5)), "fds grew by"),
    "memory that is never given back": (_samples(*(n << 24 for n in range(80)), what="rss_bytes"), "rss_bytes grew"),
    "a store that is never cleared": (_samples(1, 5000, what="files"), "5000 files"),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_a_breach_is_reported(breach: str) -> None:
    """Each forbidden event, added once to a sound history, is reported by the sentence of its own rule."""
    change, told = BREACHES[breach]
    bounds = Bounds(recovery_s=10.0 if "slow" in breach else 1000.0)
    found = check(change(sound_history()), JOB, bounds)
    assert any(told in sentence for sentence in found), found
    assert len(found) <= 8, found


def test_every_rule_is_broken_by_some_breach() -> None:
    bounds = Bounds(recovery_s=10.0)
    broken = {
        rule
        for change, _ in BREACHES.values()
        for rule in RULES
        if any(rule(change(sound_history()), JOB.train, bounds))
    }
    assert broken == set(RULES)


def test_rolled_back_work_may_be_incomplete() -> None:
    """The worker that died in batch 3 left half of its lines; that batch was computed again."""
    history = sound_history()
    kept = [o for o in history.operations if not (o.generation == 1 and o.batch == 3)]
    assert check(replace(history, operations=kept), JOB) == ()


def test_a_replica_may_end_before_an_update_that_another_has_written() -> None:
    """Generation 5 takes over at boundary 5. Of the last update before it one replica is enough, none is too few."""
    history = sound_history()
    fifth = replace(PLANS[2], generation=5, boundary=5)
    work = [replace(o, generation=5) if (o.generation, o.batch) == (4, 5) else o for o in history.operations]
    loads = [
        *history.loads,
        *(replace(load, generation=5, boundary=5) for load in history.loads if load.generation == 4),
    ]
    taken_over = replace(history, plans=(*PLANS, fifth), operations=work, loads=loads)
    assert check(taken_over, JOB) == ()
    lacking = changed(taken_over, (4, 2, "update", 4, None), never)
    assert check(lacking, JOB) == ()
    assert any("counts 0 times" in line for line in check(changed(lacking, (4, 1, "update", 4, None), never), JOB))
    inside = changed(taken_over, (5, 2, "update", 5, None), never)
    assert any("counts 0 times" in line for line in check(inside, JOB)), "no plan followed it"


def test_a_job_that_began_with_a_checkpoint_has_no_batches_before_it() -> None:
    """Its first plan loads boundary 2 of a folder: batches 0 and 1 were computed elsewhere. Not so from nodes."""
    history = sound_history()
    later = tuple(replace(plan, source="checkpoint") if plan.generation == 3 else plan for plan in PLANS[1:])
    work = [o for o in history.operations if o.generation > 1]
    loads = [load for load in history.loads if load.generation > 1]
    assert check(replace(history, plans=later, operations=work, loads=loads), JOB) == ()
    found = check(replace(history, plans=PLANS[1:], operations=work, loads=loads), JOB)
    assert found == ("batch 0: no plan ever computed it", "batch 1: no plan ever computed it")


def test_a_job_that_runs_is_checked_up_to_its_last_plan() -> None:
    """While generation 4 computes, what it has not done yet is no breach; a hole before its boundary is one."""
    history = sound_history()
    begun = [o for o in history.operations if o.generation < 4 or o.batch == 4]
    assert check(replace(history, operations=begun, is_finished=False, ended_at=None), JOB) == ()
    holed = changed(replace(history, operations=begun, is_finished=False), (3, 1, "backward", 2, 0), never)
    assert any("counts 0 times" in sentence for sentence in check(holed, JOB))


def test_a_second_fault_restarts_the_wait_for_progress() -> None:
    """Progress comes 16.9 s after the first fault and 7.9 s after the second: within 10 s of the last one."""
    ten = Bounds(recovery_s=10.0)
    assert check(_faults((13.95, 16.0), (20.0, 25.0))(sound_history()), JOB, ten) == ()
    one = check(_faults((13.95, 16.0))(sound_history()), JOB, ten)
    assert [sentence[:15] for sentence in one] == ["fault 0: 16.9 s"]


def test_many_breaches_of_one_kind_are_summed_up() -> None:
    """The report has a few examples and a count, not a page."""
    history = sound_history()
    wrong = [replace(o, versions_live=3) for o in history.operations]
    found = check(replace(history, operations=wrong), JOB)
    assert len(found) == 6
    assert found[-1].startswith("… and ")
