"""The question of a plan is the same whether what nodes offer is remembered or found anew."""

import pickle
import random
from dataclasses import replace

from headway.daemon.cluster.records import Device, DeviceKey, NodeRecord
from headway.daemon.jobs.job import PluginsSpec
from headway.daemon.plan.cluster_plan import ClusterPlan, PlanRefused
from headway.daemon.plan.devices import DeviceSlot, natural
from headway.daemon.plan.plan_question import PlanQuestion, ask
from headway.daemon.plan.planner import answer
from tests.rigs.simulated_cluster import small_spec

SITES = ("here", "there")


def node(name: str, chance: random.Random) -> NodeRecord:
    """A node with one or two devices in some state."""
    return NodeRecord(
        name=name,
        incarnation=f"{name}-{chance.randrange(2)}",
        address=chance.choice((f"{name}:1", f"relay:7070/{name}~")),
        host=name,
        site=chance.choice(SITES),
        devices=tuple(Device(kind="cpu", index=index, speed=1.0) for index in range(chance.randrange(1, 3))),
        memory_bytes=0,
        arithmetic_class="one",
        is_draining=not chance.randrange(5),
        stays_out=chance.choice(("", "", "", "its disk is full")),
        down_devices=chance.choice(((), (), (0,))),
    )


def test_questions_follow_every_node() -> None:
    """Nodes come, go and change; jobs want other sites, and others have other devices: each question is as if asked
    for the first time. What a planner's process gets is equal too.
    """
    chance = random.Random(1)
    nodes = {name: node(name, chance) for name in (f"n{number}" for number in range(9))}
    questions: list[PlanQuestion] = []
    for _ in range(300):
        name = f"n{chance.randrange(14)}"
        if chance.randrange(3):
            nodes[name] = node(name, chance)
        else:
            nodes.pop(name, None)
        spec = small_spec("j", sites=chance.choice(((), SITES[:1])))
        busy: frozenset[DeviceKey] = frozenset((f"n{chance.randrange(14)}", index) for index in range(2))
        quarantined = frozenset({f"n{chance.randrange(14)}"})
        found = ask(spec, tuple(nodes.values()), busy=busy, quarantined=quarantined)
        free = [
            each
            for each in sorted(nodes.values(), key=lambda each: natural(each.name))
            if not (each.is_draining or each.stays_out or each.name in quarantined)
            and each.site in (spec.placement.sites or SITES)
        ]
        assert found.slots == tuple(
            DeviceSlot.of(each, index)
            for each in free
            for index in range(len(each.devices))
            if index not in each.down_devices and (each.name, index) not in busy
        )
        assert pickle.loads(pickle.dumps(found)) == found
        assert {name for name, _ in found.relayed.relays} == {each.name for each in free if each.relay}
        questions.append(found)
        for other in questions[-20:]:
            same = replace(other, slots=found.slots) == found
            assert (other == found) == (other.slots == found.slots and same)


def test_the_build_of_flash3_is_a_part_of_the_arithmetic_of_jobs_that_name_it() -> None:
    """A card with it, one with another build, one without: two classes; for a job with `flash` all are one."""
    builds = {"a": "3.0 aa", "b": "3.0 bb", "c": ""}
    plain = replace(node("a", random.Random(0)), is_draining=False, stays_out="")
    cards = {
        name: Device(kind="cuda", capability="9.0", memory_bytes=1 << 40, arithmetic_class="one", flash3=build)
        for name, build in builds.items()
    }
    nodes = tuple(replace(plain, name=name, devices=(card,), down_devices=()) for name, card in cards.items())
    spec = small_spec("j").with_values({"train.dtype": "bfloat16", "train.attention_backend": "flash3"})
    question = ask(spec, nodes)
    assert {slot.node: slot.arithmetic_class for slot in question.slots} == {
        "a": "one with flash3 3.0 aa",
        "b": "one with flash3 3.0 bb",
    }
    assert any("node c has no attention_backend" in sentence for sentence in question.left_out)
    flash = spec.with_values({"train.attention_backend": "flash"})
    assert {slot.arithmetic_class for slot in ask(flash, nodes).slots} == {"one"}


def test_the_wheel_of_plug_ins_is_a_part_of_the_arithmetic() -> None:
    """Of a job whose bits must be one class's: it goes on with its own code, and not with another wheel."""
    nodes = (replace(node("a", random.Random(0)), allow_plugins=("any",), is_draining=False, stays_out=""),)
    exact = small_spec("j").with_values({"train.exactness": "required"})
    ours, theirs = (replace(exact, plugins=PluginsSpec(wheel="w.whl", sha256=digit * 64)) for digit in "12")
    (known,) = {slot.arithmetic_class for slot in ask(ours, nodes).slots}
    assert known == f"one with w.whl {'1' * 16}"
    assert isinstance(answer(ask(ours, nodes, history=(known,))), ClusterPlan)
    refused = answer(ask(theirs, nodes, history=(known,)))
    assert isinstance(refused, PlanRefused)
    assert refused.reason.startswith(f'exactness = "required" and the job began on {known}')
