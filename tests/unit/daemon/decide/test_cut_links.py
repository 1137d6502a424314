"""A link that is cut and goes on is told of: once, and once more; and one that flaps fills no list of events."""

from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import GoodputRecord, LinkCuts
from headway.daemon.cluster.records import Phase
from headway.daemon.decide.failures import CUTS_ONE_BY_ONE
from headway.daemon.reports.picture import picture_of
from tests.rigs.recovery import lose, trained
from tests.rigs.scenarios import events, plan, run_until
from tests.rigs.simulated_cluster import SimulatedCluster


def tell(cluster: SimulatedCluster, position: int, *cuts: LinkCuts) -> None:
    """A worker's record says what befell its links; the leader has time to decide."""
    node = plan(cluster).workers[position].node
    record = GoodputRecord(node=node, incarnation=node, cuts=cuts)
    key = Keys.goodput("first", plan(cluster).generation, position)
    cluster.store.transact({}, {key: encode(record)}, lease=cluster.nodes[node].lease)
    cluster.calm(max_rounds=3)


def test_a_cut_link_is_one_line_and_its_return_another() -> None:
    """Both ends tell of it, one after the other; nobody is counted as failed, and the report has what it cost."""
    cluster = trained("a", "b", "c", batches=6)
    before = events(cluster)
    a, b, c = (worker.node for worker in plan(cluster).workers)
    cut, back = (LinkCuts(ends=(0, 1), num_cut=1, num_back=num, cut_s=4.25 * num) for num in (0, 1))
    for position, told in ((0, cut), (1, cut), (0, back), (1, cut), (1, back)):
        tell(cluster, position, told)
    both = f"The link between stage 0 on {a} and stage 1 on {b}"
    assert events(cluster)[len(before) :] == [
        f"{both} is cut: both ends dial, and after 30 s without it the training goes back to a boundary",
        f"{both} was cut for 4.2 s, back now: no batch again",
    ]
    tell(cluster, 2, LinkCuts(ends=(1, 2), num_cut=1, num_back=1, cut_s=0.5))
    assert (
        events(cluster)[-1]
        == f"The link between stage 1 on {b} and stage 2 on {c} was cut for 0.5 s, back now: no batch again"
    )
    view = cluster.truth()
    assert not view.failures
    picture = picture_of(view.jobs["first"], {}, [], now_s=0.0)
    assert [(each.still_s, each.num_again) for each in picture.cuts] == [(4.25, 0), (0.5, 0)]
    assert [each.kind for each in picture.events[-3:]] == ["note", "other", "note"], "a mark for each cut"


def test_a_link_that_flaps_fills_no_list() -> None:
    """Cut a thousand times: eight are told one by one, then each doubling; seconds that were not told add up."""
    cluster = trained("a", "b", batches=6)
    before = len(events(cluster))
    for number in (*range(1, 20), 31, 32, 33, 63, 64, 500, 999, 1000):
        tell(cluster, 0, LinkCuts(ends=(0, 1), num_cut=number, num_back=number, cut_s=float(number)))
    told = events(cluster)[before:]
    assert len(told) == CUTS_ONE_BY_ONE + len((16, 32, 64, 500, 1000))
    assert "was cut for 500.0 s, back now: no batch again (cut 1000 times under this plan)" in told[-1]


def test_another_links_first_cut_is_told_whatever_flaps() -> None:
    """After five hundred cuts of one link, the first of another is told, and its return."""
    cluster = trained("a", "b", "c", batches=6)
    for number in (*range(1, 9), 16, 500):
        tell(cluster, 0, LinkCuts(ends=(0, 1), num_cut=number, num_back=number, cut_s=1.0))
    before = len(events(cluster))
    for num_back in (0, 1):
        tell(cluster, 2, LinkCuts(ends=(1, 2), num_cut=1, num_back=num_back, cut_s=25.0 * num_back))
    told = events(cluster)[before:]
    assert ["is cut" in text or "was cut for 25.0 s" in text for text in told] == [True, True]


def test_a_cut_is_told_once_after_a_plan_that_came_to_nothing() -> None:
    """A plan that was dropped has raised the phase's generation above that of the plan in force."""
    cluster = trained("a", "b", batches=6)
    cluster.add_node("c")
    run_until(cluster, Phase.CHANGING)
    lose(cluster, "c")
    run_until(cluster, Phase.RUNNING)
    before = len(events(cluster))
    tell(cluster, 0, LinkCuts(ends=(0, 1), num_cut=1, num_back=0, cut_s=0.0))
    tell(cluster, 0, LinkCuts(ends=(0, 1), num_cut=1, num_back=1, cut_s=2.0))
    told = events(cluster)[before:]
    assert ["is cut" in text or "was cut for 2.0 s" in text for text in told] == [True, True]


def test_what_anybody_writes_of_links_is_no_news() -> None:
    """Ends that the plan does not have, or that are another worker's, and a record of a plan that is over."""
    cluster = trained("a", "b", batches=6)
    before = events(cluster)
    for ends in ((0, 7), (-1, 0), (1, 1), (1, 0)):
        tell(cluster, 0, LinkCuts(ends=ends, num_cut=1, num_back=0, cut_s=0.0))
    old = GoodputRecord(node="a", incarnation="a", cuts=(LinkCuts(ends=(0, 1), num_cut=1, num_back=0, cut_s=0.0),))
    cluster.store.transact({}, {Keys.goodput("first", 0, 0): encode(old)})
    cluster.calm(max_rounds=3)
    assert events(cluster) == before
