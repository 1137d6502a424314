"""What a job learns of its memory: factors from measured peaks, and less room where memory ran out."""

import pytest

from headway.daemon.cluster.measurements import DeviceShortage, MemoryShortage
from headway.daemon.cluster.records import Device
from headway.daemon.plan.cluster_plan import ClusterPlan, PlanRefused
from headway.daemon.plan.devices import DeviceSlot, MemoryLessons, after_shortage, measured_demand, still_of_use
from headway.daemon.plan.planner import make_plan
from tests.rigs.clusters import job, node, planned

CARD = Device(kind="cuda", model="H100")
GIB = 1 << 30


def short(shortage: MemoryShortage, *, predicted_bytes: int = 10 * GIB, demand: float = 1.0) -> DeviceShortage:
    (found,) = after_shortage(
        (), shortage, place=("a", "a-1", 0), device=CARD, predicted_bytes=predicted_bytes, demand=demand
    )
    return found


@pytest.mark.parametrize(
    ("peak", "predicted", "usable", "expected"),
    [
        (0, 100, 0, 1.0),  # not measured
        (100, 0, 0, 1.0),  # planned by an older leader
        (90, 100, 0, 1.0),  # never below the prediction
        (1234, 1000, 0, 1.24),
        (1234, 1000, 2000, 1.24),
        (1234, 1000, 1100, 1.1),  # it ran there, so it fits there
        (1234, 1000, 900, 1.0),
    ],
)
def test_a_measured_peak_raises_the_prediction(peak: int, predicted: int, usable: int, expected: float) -> None:
    """To hundredths, upwards; a peak inside the reserve counts as the limit."""
    assert measured_demand(peak, predicted, usable_bytes=usable) == pytest.approx(expected)


def test_the_plan_whose_peak_was_measured_is_possible_again() -> None:
    """Its measured peak lies inside the reserve; a larger stage does not fit."""
    predicted, usable = 123_456_789, 130_000_001
    demand = measured_demand(usable + 5, predicted, usable_bytes=usable)
    here = node("a", memory_bytes=usable)
    slot = DeviceSlot.of(here, 0, MemoryLessons.of((), {("cpu", ""): demand}))
    assert predicted <= slot.room_bytes < predicted * 1.001


def test_what_the_prediction_missed_counts_for_every_device_of_the_model() -> None:
    """12 GiB were not enough for a stage of 10: by 1.2 times more for all, and on that device less than 12."""
    found = short(MemoryShortage(wanted_bytes=2 * GIB, allocated_bytes=10 * GIB))
    assert found.demand == 1.2
    assert found.room_bytes == pytest.approx(0.9 * 12 * GIB, abs=1)
    lessons = MemoryLessons.of((found,), {})
    assert lessons.demand(CARD) == 1.2
    assert lessons.demand(Device(kind="cuda", model="L40S")) == 1.0
    assert lessons.room("a", "a-1", 0) == found.room_bytes
    assert lessons.room("a", "a-2", 0) == lessons.room("b", "b-1", 0) == 0


def test_memory_that_others_have_taken_counts_for_that_device_alone() -> None:
    """8 GiB were refused to a stage of 10: the prediction was not too low, the card had less."""
    found = short(MemoryShortage(wanted_bytes=GIB, allocated_bytes=7 * GIB))
    assert found.demand == 1.0
    assert found.room_bytes == 9 * GIB


@pytest.mark.parametrize("wanted_bytes", [16 * 80 * GIB, (1 << 64) - 1])
def test_a_report_of_impossible_sizes_counts_for_that_device_alone(wanted_bytes: int) -> None:
    """A card of 80 GiB says that its stage needed 16 times as much and more: other cards keep their predictions."""
    card = Device(kind="cuda", model="H100", memory_bytes=80 * GIB)
    lie = MemoryShortage(wanted_bytes=wanted_bytes, allocated_bytes=GIB)
    (found,) = after_shortage((), lie, place=("a", "a-1", 0), device=card, predicted_bytes=10 * GIB, demand=1.0)
    assert found.room_bytes == 9 * GIB
    assert MemoryLessons.of((found,), {}).demand(card) == 1.0


def test_the_same_report_twice_changes_nothing() -> None:
    """The coordinator sees a worker's record with every decision until the next plan is in force."""
    place, shortage = ("a", "a-1", 0), MemoryShortage(wanted_bytes=2 * GIB, allocated_bytes=10 * GIB)
    once = after_shortage((), shortage, place=place, device=CARD, predicted_bytes=10 * GIB, demand=1.0)
    twice = after_shortage(once, shortage, place=place, device=CARD, predicted_bytes=10 * GIB, demand=1.2)
    assert twice == once


def test_a_daemon_that_started_again_is_tried_again() -> None:
    """Its room is forgotten; what was learned of the model stays."""
    other = short(MemoryShortage(wanted_bytes=GIB, allocated_bytes=7 * GIB))
    learned = short(MemoryShortage(wanted_bytes=2 * GIB, allocated_bytes=10 * GIB))
    assert still_of_use((other,), [("a", "a-2")]) == ()
    assert still_of_use((learned,), [("a", "a-2")]) == (learned,)
    assert still_of_use((other,), [("a", "a-1")]) == (other,)


def test_plans_show_and_obey_the_raised_prediction() -> None:
    """Half as much again: the stage no longer fits on one device; the sentences say by how much it was raised."""
    spec = job(num_blocks=4)
    need = planned(spec, [node("a")]).estimates[0].device_bytes
    nodes = [node("a", memory_bytes=int(need * 1.1))]
    assert isinstance(make_plan(spec, nodes), ClusterPlan)
    raised = MemoryLessons.of((), {("cpu", ""): 1.5})
    refused = make_plan(spec, nodes, memory=raised)
    assert isinstance(refused, PlanRefused)
    assert "would help" in refused.reason
    plan = planned(spec, [*nodes, node("b", memory_bytes=int(need * 1.1))], memory=raised)
    assert len(plan.workers) == 2
    for estimate in plan.estimates:
        assert estimate.device_bytes == round(1.5 * estimate.stage.device_bytes) <= estimate.device_limit_bytes
    assert any("1.50 times the estimate, as measured" in line for line in plan.explanation())


def test_an_absurd_demand_refuses_the_plan_and_breaks_no_decision() -> None:
    """A record may hold any finite factor; the bytes computed from it must stay numbers."""
    lessons = MemoryLessons.of((), {("cpu", ""): 1e308})
    found = make_plan(job(), [node("a", memory_bytes=8 * GIB)], memory=lessons)
    assert isinstance(found, PlanRefused)
    assert found.reason.startswith("does not fit")
