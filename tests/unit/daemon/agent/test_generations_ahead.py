"""A node's record has the generations that etcd does not know, and no others: no decision differs for it."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from headway.daemon.agent.local_state import generations_ahead
from headway.daemon.cluster.cluster_records import RetiredRecord
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import NodeRecord, Phase, PhaseRecord, PlanRecord, SpecRecord, WorkerPart
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.situation import JobSituation
from tests.rigs.agent_views import node_record
from tests.rigs.simulated_cluster import small_spec

NODE = node_record("a")
STAGE = WorkerPart(node="a", node_incarnation="a-1", device_index=0, layers=("embed",), depth=1)


def view_of(*, uid: str, phase: int | None, retired: int = 0, node: NodeRecord = NODE) -> ClusterView:
    """A cluster with a job `j`, unless `phase` is None."""
    view = ClusterView()
    records: dict[str, object] = {Keys.node("a"): node}
    if phase is not None:
        records[Keys.of("j", "spec")] = SpecRecord(spec=small_spec("j"), uid=uid)
        records[Keys.of("j", "phase")] = PhaseRecord(phase=Phase.RUNNING, generation=phase)
        if phase:
            records[Keys.of("j", "plan")] = PlanRecord(generation=phase, timeline=1, workers=(STAGE,))
    if retired:
        records[Keys.retired("j")] = RetiredRecord(phase=Phase.FINISHED, generation=retired)
    for number, (key, record) in enumerate(records.items(), start=1):
        view.apply(key, encode(record), mod_revision=number, create_revision=number)
    return view


def test_a_plan_changes_no_record_of_a_node() -> None:
    """The node remembers each plan, but etcd has it too."""
    for phase in range(1, 20):
        remembered = {"j": phase, "j/u": phase, "gone": 4, "gone/v": 4}
        view = view_of(uid="u", phase=phase)
        view.retired["gone"] = RetiredRecord(phase=Phase.FINISHED, generation=4)
        assert generations_ahead(remembered, view) == {}


def test_a_node_says_what_an_older_etcd_has_forgotten() -> None:
    remembered = {"k": 2, "k/u": 2, "j": 7, "j/u": 7}
    assert generations_ahead(remembered, view_of(uid="u", phase=5)) == remembered, "`k` is in no record at all"
    assert generations_ahead({"j": 7, "j/u": 7}, view_of(uid="u", phase=7)) == {}
    assert generations_ahead({"j": 7, "j/u": 7}, view_of(uid="u", phase=None)) == {"j": 7, "j/u": 7}
    assert generations_ahead({"j": 7, "j/u": 7}, view_of(uid="u", phase=None, retired=7)) == {}


def test_a_new_job_of_a_retired_name_changes_no_record() -> None:
    assert generations_ahead({"j": 7, "j/u": 7}, view_of(uid="v", phase=0, retired=7)) == {}
    assert generations_ahead({"j": 7, "j/u": 7}, view_of(uid="v", phase=0, retired=6)) == {"j": 7, "j/u": 7}


@given(
    uid=st.sampled_from("uv"),
    phase=st.integers(0, 6),
    retired=st.integers(0, 6),
    of_submissions=st.dictionaries(st.sampled_from(["j/u", "j/v"]), st.integers(1, 9), min_size=1),
    earlier=st.integers(0, 9),
)
def test_what_is_left_out_changes_no_decision(
    uid: str, phase: int, retired: int, of_submissions: dict[str, int], earlier: int
) -> None:
    """The next number, and whether etcd has forgotten a plan, are the same as if the node wrote all that it knows."""
    by_name = max([earlier, *of_submissions.values()])
    remembered = of_submissions | ({"j": by_name} if by_name else {})
    ahead = generations_ahead(remembered, view_of(uid=uid, phase=phase, retired=retired))
    found = []
    for generations in (remembered, ahead):
        view = view_of(uid=uid, phase=phase, retired=retired, node=replace(NODE, generations=generations))
        situation = JobSituation(job=view.jobs["j"], view=view, now=0.0, written_at=0.0)
        known = situation.known_generation
        found.append((situation.generation, max(known, phase) if known > phase else 0))
    assert found[0] == found[1]
