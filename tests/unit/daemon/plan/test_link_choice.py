"""Which kind of link two workers have: what the job asks for, as far as it is safe, and what is faster."""

from dataclasses import replace

import pytest

from headway.daemon.client.preview import preview
from headway.daemon.cluster.records import PlanRecord, WorkerPart
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.plan.layer_costs import hidden_bytes, layer_costs
from headway.daemon.plan.link_choice import (
    WORTH_BEING_PLAIN_BYTES,
    LinkChoice,
    LinkEnd,
    choose_link,
    largest_frame_bytes,
    link_sentences,
    planned_links,
)
from headway.stages.spec import ModelSpec, TrainSpec
from tests.rigs.clusters import job, node

HERE = LinkEnd(node="a", site="hall", host="10.0.0.1", device_kind="cpu", site_is_private=True)
THERE = LinkEnd(node="b", site="hall", host="10.0.0.2", device_kind="cpu", site_is_private=True)
BIG = WORTH_BEING_PLAIN_BYTES


@pytest.mark.parametrize(
    ("wanted", "changes", "frame_bytes", "is_collective", "why"),
    [
        ("auto", {}, BIG, True, "a connection without TLS carries them faster"),
        ("auto", {}, BIG - 1, False, "gRPC carries them as fast"),
        ("auto", {"site_is_private": False}, BIG, False, "has no site_is_private"),
        ("auto", {"site_is_private": False, "host": "10.0.0.1"}, BIG, True, "faster"),
        ("collective", {"site_is_private": False}, BIG, False, "has no site_is_private"),
        ("collective", {"site_is_private": False, "host": "10.0.0.1"}, BIG, True, "the job asks"),
        ("auto", {"device_kind": "cuda"}, 1, True, "devices of the private site hall: NCCL carries"),
        ("auto", {"device_kind": "cuda", "host": "10.0.0.1"}, 1, True, "devices of one machine: NCCL carries"),
        ("auto", {"device_kind": "cuda", "site_is_private": False}, BIG, False, "has no site_is_private"),
        ("auto", {"device_kind": "cuda", "has_ports": True}, BIG, False, "a collective link takes any port"),
        ("grpc", {"device_kind": "cuda", "host": "10.0.0.1"}, BIG, False, "the job asks for gRPC links"),
        (
            "auto",
            {"device_kind": "cuda", "shares_its_card": True, "host": "10.0.0.1"},
            BIG,
            False,
            "NCCL gives a card to one process",
        ),
        ("collective", {}, 1, True, "the job asks for collective links"),
        ("collective", {"device_kind": "cuda"}, 1, True, "the job asks for collective links"),
        ("collective", {"device_kind": "cuda", "shares_its_card": True}, 1, True, "the job asks for collective links"),
        (
            "collective",
            {"device_kind": "cuda", "shares_its_card": True, "host": "10.0.0.1"},
            1,
            False,
            "NCCL gives a card to one process",
        ),
        ("grpc", {}, BIG, False, "the job asks for gRPC links"),
    ],
)
def test_inside_one_site(
    wanted: str, changes: dict[str, object], frame_bytes: int, is_collective: bool, why: str
) -> None:
    """Two workers that are alike: the kind, and the sentence that says why."""
    one, other = replace(HERE, **changes), replace(THERE, **changes)  # type: ignore[arg-type]
    choice = choose_link(wanted, one, other, frame_bytes=frame_bytes)  # type: ignore[arg-type]
    assert choice.is_collective == is_collective
    assert why in choice.reason
    assert choose_link(wanted, other, one, frame_bytes=frame_bytes).is_collective == is_collective  # type: ignore[arg-type]


@pytest.mark.parametrize("wanted", ["auto", "collective"])
def test_one_machine_whose_site_is_not_private_is_enough_for_encryption(wanted: str) -> None:
    """Both administrators have to say it, and the reason names the one that did not."""
    guarded = replace(THERE, site_is_private=False)
    for ends in ((HERE, guarded), (guarded, HERE)):
        choice = choose_link(wanted, *ends, frame_bytes=BIG)  # type: ignore[arg-type]
        assert not choice.is_collective
        assert choice.reason.startswith("node b has no site_is_private")


@pytest.mark.parametrize("wanted", ["auto", "collective"])
def test_a_node_that_keeps_to_some_ports_has_no_group_with_another_machine(wanted: str) -> None:
    """A collective link listens where it likes, and a firewall lets the named ports in alone; one machine has none."""
    keeper = replace(THERE, has_ports=True)
    for ends in ((HERE, keeper), (keeper, HERE)):
        choice = choose_link(wanted, *ends, frame_bytes=BIG)  # type: ignore[arg-type]
        assert choice == LinkChoice(False, "node b has named ports, and a collective link takes any port")
    assert choose_link("auto", replace(keeper, host=HERE.host), HERE, frame_bytes=BIG).is_collective


@pytest.mark.parametrize("wanted", ["auto", "collective"])
@pytest.mark.parametrize(
    ("field", "why"), [("site", "between sites everything is encrypted"), ("device_kind", "one kind")]
)
def test_what_differs_is_linked_by_grpc_whatever_the_job_asks_for(wanted: str, field: str, why: str) -> None:
    """Two sites, or a CPU and a CUDA device: never a collective link."""
    choice = choose_link(wanted, HERE, replace(THERE, **{field: "other"}), frame_bytes=BIG)  # type: ignore[arg-type]
    assert not choice.is_collective
    assert why in choice.reason


def test_the_largest_frame_is_the_same_from_either_end() -> None:
    """Stages exchange hidden states; replicas with one and three of four groups three sums of half a stage."""
    spec = JobSpec(
        job=JobSection(name="j"),
        model=ModelSpec(num_hidden_layers=2),
        train=TrainSpec(microbatches=4, reduction_groups=4),
    )
    layers = spec.layers

    def worker(node: str, held: tuple[str, ...], *groups: int) -> WorkerPart:
        return WorkerPart(node=node, node_incarnation=node, device_index=0, layers=held, depth=1, groups=groups)

    plan = PlanRecord(
        generation=1,
        timeline=1,
        workers=(worker("a", layers[:1]), worker("b", layers[1:], 0), worker("c", layers[1:], 1, 2, 3)),
    )
    sums = sum(cost.group_bytes for cost in layer_costs(spec)[1:])
    assert largest_frame_bytes(spec, plan, 0, 1) == largest_frame_bytes(spec, plan, 1, 0) == hidden_bytes(spec)
    assert largest_frame_bytes(spec, plan, 1, 2) == largest_frame_bytes(spec, plan, 2, 1) == 3 * sums // 2


def test_every_link_of_a_plan_says_its_kind_and_why() -> None:
    """One stage of two replicas in the hall, one in a shed: between neighbours that share groups, and between replicas,
    by the rule and the frame that their daemons ask for."""
    spec = job(microbatches=4, reduction_groups=4, link="collective")
    layers = spec.layers
    plan = PlanRecord(
        generation=1,
        timeline=1,
        workers=tuple(
            WorkerPart(node=name, node_incarnation=name, device_index=0, layers=held, depth=1, groups=groups)
            for name, held, groups in (
                ("a", layers[:1], (0, 2)),
                ("b", layers[:1], (1, 3)),
                ("c", layers[1:5], ()),
                ("d", layers[5:], (0,)),
                ("e", layers[5:], (1, 2, 3)),
            )
        ),
    )
    nodes = {name: node(name, site="shed" if name == "c" else "hall") for name in "abcde"}
    links = planned_links(spec, plan, nodes)
    far = "sites hall and shed: between sites everything is encrypted"
    assert [(link.upper, link.lower, link.kind) for link in links] == [
        ("a", "c", "grpc"),
        ("b", "c", "grpc"),
        ("c", "d", "grpc"),
        ("c", "e", "grpc"),
        ("a", "b", "collective"),
        ("d", "e", "collective"),
    ]
    assert {link.reason for link in links[:2]} == {far}
    assert link_sentences(links)[1:] == (
        "Links by gRPC (c → d, c → e): sites shed and hall: between sites everything is encrypted.",
        "Links by plain connection (a → b, d → e): the job asks for collective links, and both are in site hall.",
    )
    assert not planned_links(spec, plan, {"c": nodes["c"]})


def test_the_dry_run_tells_of_the_links() -> None:
    """`auto` between two nodes of one hall with small frames: gRPC, and the size that decides."""
    told, _ = preview(job(), [node("a", site="hall"), node("b", site="hall")])
    assert [(link.upper, link.lower, link.kind) for link in told.link_kinds] == [("a", "b", "grpc")]
    assert any(line.startswith("Link by gRPC (a → b): frames of 512 KiB") for line in told.lines)
    coded, _ = preview(job(wire="bf16", wire_between="stages"), [node("a", site="hall"), node("b", site="hall")])
    assert any(line.startswith("Link by gRPC (a → b): frames of 256 KiB") for line in coded.lines)


def test_links_inside_a_node_name_the_unix_socket() -> None:
    """Two devices of one node, and one of another: only the first link needs no TLS, and the sentence says why."""
    spec = job(link="grpc")
    layers = tuple(cost.name for cost in layer_costs(spec))
    places = (("a", 0, layers[:1]), ("a", 1, layers[1:5]), ("b", 0, layers[5:]))
    plan = PlanRecord(
        generation=1,
        timeline=1,
        workers=tuple(
            WorkerPart(node=name, node_incarnation=name, device_index=index, layers=held, depth=1)
            for name, index, held in places
        ),
    )
    links = planned_links(spec, plan, {"a": node("a", num_devices=2), "b": node("b")})
    assert link_sentences(links) == (
        "Link by gRPC (a:0 → a:1): the job asks for gRPC links; inside a node over a unix socket.",
        "Link by gRPC (a:1 → b): the job asks for gRPC links.",
    )
