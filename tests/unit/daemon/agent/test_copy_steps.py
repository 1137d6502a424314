"""A node fetches copies for others, and spaces snapshots out."""

from dataclasses import replace
from pathlib import Path

from headway.daemon.agent.local_state import NodeState
from headway.daemon.agent.state_steps import copy_steps, spacing_of
from headway.daemon.agent.steps import Fetch, Step
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import (
    Phase,
    PhaseRecord,
    PlanRecord,
    SpecRecord,
    StateFile,
    StateRecord,
    WorkerPart,
)
from headway.daemon.cluster.state_key import JOURNAL, StateKey, StoredFile
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.decide.job_view import JobView
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.plan.copy_places import possible_holders
from headway.daemon.worker.goal import Goal, JobGeneration, Spacing
from headway.stages.spec import ModelSpec
from headway.stages.state.file_digest import FileDigest
from tests.rigs.agent_views import node_record, now, worker
from tests.rigs.agent_views import node_record as registered
from tests.rigs.simulated_cluster import small_spec

FRONT, BACK = ("embed", "block.0"), ("head", JOURNAL)
PLAN = PlanRecord(
    generation=3,
    timeline=3,
    ancestry=((1, 20),),
    workers=(
        WorkerPart(node="a", node_incarnation="a-1", device_index=0, layers=FRONT, depth=4),
        WorkerPart(node="b", node_incarnation="b-1", device_index=0, layers=BACK[:1], depth=4),
    ),
)
"""With two nodes each is the other's only buddy."""


def told(name: str, *parts: str) -> StateRecord:
    files = {part: StateFile(size_bytes=10, checksum=f"sha-{part}") for part in parts}
    return StateRecord(incarnation=f"{name}-1", generation=3, files=files)


def view(state: dict[tuple[int, int], dict[str, StateRecord]]) -> ClusterView:
    spec = JobSpec(job=JobSection(name="j"), model=ModelSpec(num_hidden_layers=1))
    job = JobView(name="j", submission=SpecRecord(spec=spec), plan=PLAN, state=state)
    nodes = {name: node_record(name) for name in "ab"}
    return ClusterView(jobs={"j": job}, nodes=nodes)


def node(*held: tuple[int, str], **fields: object) -> NodeState:
    """Node a, whose worker runs, with these (boundary, part)."""
    files = {
        StateKey("j", 3, boundary, part): StoredFile(path=Path("/s"), size_bytes=10, checksum=f"sha-{part}")
        for boundary, part in held
    }
    running = worker(prepared=3, started=3)
    return NodeState(name="a", incarnation="a-1", workers=(running,), held=files, **fields)  # type: ignore[arg-type]


def copies(boundary: int, *parts: str, timeline: int = 3) -> list[Step]:
    """Copies of b's parts."""
    return [
        Fetch(
            None,
            JobGeneration("j", 3),
            StateKey("j", timeline, boundary, part),
            ("b",),
            "",
            FileDigest(size_bytes=10, checksum=f"sha-{part}"),
        )
        for part in parts
    ]


def steps(state: dict[tuple[int, int], dict[str, StateRecord]], of: NodeState) -> list[Step]:
    return list(copy_steps(view(state), of))


def fetches(of: ClusterView) -> list[Fetch]:
    """What a node fetches that has its own files of boundary 40."""
    found = copy_steps(of, node((40, "embed"), (40, "block.0")))
    return [step for step in found if isinstance(step, Fetch)]


def test_a_buddy_fetches_all_of_a_stages_files() -> None:
    """b has registered its head and journal at 40: both are fetched, except files that are here already."""
    state = {(3, 40): {"a": told("a", *FRONT), "b": told("b", *BACK)}}
    assert steps(state, node()) == copies(40, *BACK)
    assert steps(state, node((40, "head"))) == copies(40, JOURNAL)
    assert steps(state, node((40, "head"), (40, JOURNAL))) == []


def test_the_oldest_boundary_is_fetched_first_and_alone() -> None:
    """40 and 60 lack copies: 60 is fetched only after 40 is here."""
    state = {(3, at): {"a": told("a", *FRONT), "b": told("b", *BACK)} for at in (40, 60)}
    assert steps(state, node()) == copies(40, *BACK)
    assert steps(state, node((40, "head"), (40, JOURNAL))) == copies(60, *BACK)


def test_nothing_older_than_a_restorable_boundary_is_fetched() -> None:
    """60 has its copies, so 40 is not fetched."""
    state = {
        (3, 40): {"b": told("b", *BACK)},
        (3, 60): {"a": told("a", *FRONT, *BACK), "b": told("b", *FRONT, *BACK)},
    }
    assert steps(state, node()) == []


def test_boundaries_off_the_timeline_are_not_fetched() -> None:
    """The job left timeline 1 at 20, so its boundary 40 is useless and its boundary 20 is not."""
    assert steps({(1, 40): {"b": told("b", *BACK)}}, node()) == []
    assert steps({(1, 20): {"b": told("b", *BACK)}}, node()) == copies(20, *BACK, timeline=1)


def test_a_record_of_a_replaced_daemon_is_not_fetched_from() -> None:
    """b's record is from its earlier daemon."""
    assert steps({(3, 40): {"b": replace(told("b", *BACK), incarnation="b-0")}}, node()) == []


def test_snapshots_are_spaced_out_when_copies_lag() -> None:
    """Four boundaries without copies double the distance between snapshots; four more double it again."""

    def lagging(*boundaries: int) -> dict[tuple[int, int], dict[str, StateRecord]]:
        return {(3, at): {"a": told("a", *FRONT), "b": told("b", *BACK)} for at in boundaries}

    usual = Spacing()

    def spacing(*boundaries: int, wanted: Spacing = usual, told: Spacing = usual) -> Spacing:
        running = replace(now(worker(prepared=3, started=3), spacing=told), goal=Goal(job="j", spacing=wanted))
        seen = view(lagging(*boundaries))
        return spacing_of(seen, seen.jobs["j"], running)

    assert spacing(20, 40, 60) == Spacing()
    first = spacing(20, 40, 60, 80)
    assert first == Spacing(2, 80)
    assert spacing(20, 40, 60, 80, 120, wanted=first) == first
    assert spacing(20, 40, 60, 80, 120, 160, 200, 240, wanted=first) == Spacing(4, 240)
    assert spacing(20, 40, 60, 80, 120, told=Spacing(4, 80)) == Spacing(), "the worker has spaced them by itself"


def test_files_of_a_lost_owner_are_copied_again() -> None:
    """Owner b is lost and only c has its files: a fetches them before c may be lost too."""
    job_view = view({(3, 40): {"a": told("a", *FRONT), "b": told("b", *BACK), "c": told("c", *FRONT, *BACK)}})
    nodes = {"a": job_view.nodes["a"], "c": replace(job_view.nodes["b"], name="c", incarnation="c-1", host="c")}
    found = fetches(replace(job_view, nodes=nodes))
    assert [(step.key.layer, step.holders) for step in found] == [("head", ("c",)), (JOURNAL, ("c",))]


def test_copies_are_made_for_the_next_plan_during_a_recovery() -> None:
    """c takes over from the lost node b, so c's buddy a fetches the files that only c has."""
    job_view = view({(3, 40): {"a": told("a", *FRONT), "c": told("c", *FRONT, *BACK)}})
    nodes = {"a": job_view.nodes["a"], "c": replace(job_view.nodes["b"], name="c", incarnation="c-1", host="c")}
    back = replace(PLAN.workers[1], node="c", node_incarnation="c-1")
    coming = replace(PLAN, generation=4, timeline=4, workers=(PLAN.workers[0], back))
    job = replace(job_view.jobs["j"], phase=PhaseRecord(phase=Phase.RECOVERING), next=coming)
    found = fetches(replace(job_view, jobs={"j": job}, nodes=nodes))
    assert [step.key.layer for step in found] == ["head", JOURNAL]


def test_sites_are_told_apart_whatever_is_in_their_names() -> None:
    """One site is named as two others with a comma between them."""
    found = ClusterView()
    for number, site in enumerate(("a", "b", "a, b")):
        record = replace(registered(f"n{number}"), site=site)
        found.apply(Keys.node(record.name), encode(record), mod_revision=number + 1, create_revision=number + 1)

    def holders(*sites: str) -> list[str]:
        spec = small_spec("j")
        spec = replace(spec, placement=replace(spec.placement, sites=sites))
        return [each.name for each in possible_holders(spec, found.nodes)]

    assert (holders("a", "b"), holders("a, b")) == (["n0", "n1"], ["n2"])
