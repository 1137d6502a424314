"""Any bytes under any key are set aside by name, and no other record changes."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headway.daemon.agent.steps_due import next_steps
from headway.daemon.base.terminal import printable_name
from headway.daemon.cluster.cluster_records import RetiredRecord, RevokedRecord, SharesRecord, UsageRecord
from headway.daemon.cluster.format import NewerFormatError, decode, encode
from headway.daemon.cluster.keys import PREFIX, Keys
from headway.daemon.cluster.measurements import (
    LayerTime,
    LinkProbe,
    Port,
    ProbeRecord,
    ProfileRecord,
    ProgressRecord,
    ReachFact,
    ReachRecord,
)
from headway.daemon.cluster.records import (
    ANY_NEWER,
    Device,
    NodeRecord,
    Phase,
    PhaseRecord,
    PlanRecord,
    SpecRecord,
    WorkerPort,
    newer_ailment,
)
from headway.daemon.cluster.transaction import Compare, Put, to_bytes, to_text, transaction_request
from headway.daemon.decide.cluster_view import UNREADABLE, ClusterView
from headway.daemon.decide.commands import Transaction
from headway.daemon.decide.coordinator import decide
from headway.daemon.jobs.job import DataSpec, SourceSpec
from headway.daemon.reports.job_report import report_line, reports_in
from headway.daemon.reports.node_list import set_aside_lines
from headway.daemon.worker.goal import Goal
from tests.rigs.agent_views import RUNNING, node
from tests.rigs.simulated_cluster import SimulatedCluster, small_spec

NODE = NodeRecord(
    name="a",
    incarnation="a-1",
    address="",
    host="",
    site="x",
    devices=(Device(kind="cpu"),),
    memory_bytes=0,
    arithmetic_class="",
)
GARBAGE = b"\xff\x00 garbage"
NEWER = b'{"format":3,"anything":[]}'


def history() -> list[Any]:
    """Return the changes of a cluster in which two jobs run."""
    cluster = SimulatedCluster(1)
    cluster.add_node("a")
    cluster.add_node("b")
    cluster.submit(small_spec("first", batches=50, max_nodes=1))
    cluster.submit(small_spec("second", batches=50, max_nodes=1))
    cluster.calm(max_rounds=20)
    return list(cluster.store.history)


HISTORY = history()


def view_of(changes: list[Any]) -> ClusterView:
    view = ClusterView()
    for change in changes:
        view.apply(change.key, change.value, mod_revision=change.revision, create_revision=change.create_revision)
    view.set_in_sight(True, now=-100.0)
    return view


def put(view: ClusterView, key: str, value: bytes | None, revision: int = 10**6) -> None:
    view.apply(key, value, mod_revision=revision, create_revision=revision, now=1.0)


KNOWN_KEYS = sorted({change.key for change in HISTORY})
PARTS = st.one_of(
    st.sampled_from(["nodes", "jobs", "leader", "placement", "probes", "reach", "failures", "first", "state"]),
    st.sampled_from(["spec", "plan", "workers", "events", "goodput", "profile", "a", "00000001", "0001", "-1", "٣"]),
    st.text(max_size=8),
    st.binary(max_size=8).map(to_text),
)
MADE_UP = st.lists(PARTS, max_size=6).map(lambda parts: PREFIX + "/".join(parts))
ANY_KEYS = st.one_of(st.sampled_from(KNOWN_KEYS), MADE_UP)
ANY_VALUES = st.one_of(
    st.none(),
    st.binary(max_size=60),
    st.sampled_from([GARBAGE, NEWER, b"{}", b"[]", b"null", b"[" * 10_000, b'{"format":1}', b'{"format":"x"}']),
    st.sampled_from([change.value for change in HISTORY if change.value]),
)


@settings(max_examples=300, deadline=None)
@given(key=ANY_KEYS, value=ANY_VALUES)
@example(key="/headway/nodes/b", value=GARBAGE)
@example(key="/headway/jobs/first/workers/x/y", value=b"{}")
@example(key="/headway/jobs/first/state/1/2/3/4", value=b"{}")
@example(key="/headway/failures/a/1/2", value=None)
@example(key=to_text(b"/headway/jobs/\xff\xfe/spec"), value=GARBAGE)
def test_any_bytes_under_any_key_leave_the_others_as_they_are(key: str, value: bytes | None) -> None:
    """Folding never raises; the view of a job, or node, whose key it is not stays the same; a deletion ends it."""
    clean, view = view_of(HISTORY), view_of(HISTORY)
    put(view, key, value)
    for name, job in clean.jobs.items():
        if not key.startswith(Keys.job(name)):
            assert replace(view.jobs[name], entered_at=0.0) == replace(job, entered_at=0.0)
    for name, record in clean.nodes.items():
        if key != Keys.node(name):
            assert view.nodes[name] == record
    decide(view, now=100.0, plans=None)
    assert all(printable_name(line) == line for line in set_aside_lines(view))
    put(view, key, None, 10**6 + 1)
    assert key not in view.unreadable
    assert view.revision_of(key) == 0


@pytest.mark.parametrize("leaf", ["spec", "desired", "phase", "plan", "next", "stop", "checkpoint"])
@pytest.mark.parametrize("value", [GARBAGE, NEWER])
def test_a_job_with_an_unreadable_record_is_set_aside_alone(leaf: str, value: bytes) -> None:
    """The last readable record stays, nobody decides, no transaction compares equal; once it is mended it goes on."""
    view = view_of(HISTORY)
    before = replace(view.jobs["first"])
    put(view, Keys.of("first", leaf), value)
    assert view.revision_of(Keys.of("first", leaf)) == UNREADABLE
    assert view.why_set_aside("first").startswith(f"its {leaf} cannot be read: ")
    assert not view.why_set_aside("second")
    assert (view.jobs["first"].plan, view.jobs["first"].phase) == (before.plan, before.phase)
    assert "first" not in {command.job for command in decide(view, now=100.0).commands}
    put(view, Keys.of("first", "desired"), b'{"state":"cancelled","request":9}', 10**6 + 1)
    put(view, Keys.of("second", "desired"), b'{"state":"cancelled","request":9}', 10**6 + 2)
    decision = decide(view, now=100.0)
    expected = {"first", "second"} if leaf == "desired" else {"second"}
    assert {command.job for command in decision.commands if command.job} == expected


SPEC_KEY = Keys.of("first", "spec")
SPEC_RAW = msgspec.json.decode(next(change.value for change in HISTORY if change.key == SPEC_KEY))


@pytest.mark.parametrize(
    ("section", "value", "told"),
    [
        ("train", 3, "spec.train.ahead"),
        ("data", {"of": {"each": 0.5}}, "spec.data.ahead"),
        ("train", 0, ""),
        ("train", {"of": {"each": 0, "name": "", "parts": []}}, ""),
    ],
)
def test_a_job_with_a_setting_of_a_newer_release_is_left_alone(section: str, value: object, told: str) -> None:
    """Whoever skipped it would train another job. A setting that is off changes nothing, and is skipped."""
    spec = SPEC_RAW["spec"]
    raw = SPEC_RAW | {"unknown": 1, "spec": spec | {section: spec[section] | {"ahead": value}}}
    view = view_of(HISTORY)
    put(view, SPEC_KEY, msgspec.json.encode(raw))
    why = f"a newer release wrote it: this one does not know {told}, which is set; upgrade this machine"
    assert [*view.newer_jobs()] == ([("first", f"its spec cannot be read: {why}")] if told else [])
    assert ("first" in {command.job for command in decide(view, now=100.0).commands}) <= (not told)


def test_a_setting_of_a_newer_release_within_a_list_counts() -> None:
    """Each source of a job's data is a section of its own."""
    spec = msgspec.to_builtins(replace(small_spec("first"), data=DataSpec(sources=(SourceSpec(source="x"),))))
    raw = {"format": 1, "spec": spec}
    assert decode(msgspec.json.encode(raw), SpecRecord).spec.data.sources[0].source == "x"
    spec["data"]["sources"] = [{**spec["data"]["sources"][0], "ahead": True}]
    with pytest.raises(NewerFormatError, match=r"does not know spec\.data\.sources\.ahead"):
        decode(msgspec.json.encode(raw), SpecRecord)


@pytest.mark.parametrize(
    ("ailment", "left_out"), [(newer_ailment("first"), {"first"}), (ANY_NEWER, {"first", "second"})]
)
def test_plans_leave_out_the_node_to_which_a_job_is_too_new(ailment: str, left_out: set[str]) -> None:
    """Only those of that job, or of all where there are too many to name; and it is charged for nothing."""
    cluster = SimulatedCluster()
    for name in ("a", "b", "c"):
        cluster.add_node(name)
    old = cluster.nodes["a"]
    old.record = replace(old.record, ailments={ailment: "its spec cannot be read"})
    for name in ("first", "second"):
        cluster.submit(small_spec(name, batches=20))
        cluster.calm(until=lambda name=name: cluster.phase(name).phase is Phase.FINISHED, max_rounds=400)
    used = {
        change.key: {stage.node for stage in decode(change.value, PlanRecord).workers}
        for change in cluster.store.history
        if change.key.endswith("/plan") and change.value
    }
    assert used == {
        Keys.of(name, "plan"): {"b", "c"} if name in left_out else {"a", "b", "c"} for name in ("first", "second")
    }
    assert not any(key.startswith(Keys.FAILURES) for key in cluster.store.values)


@pytest.mark.parametrize(
    ("key", "record"),
    [
        (Keys.USAGE, UsageRecord(seconds={"bob": 1e308})),
        (Keys.USAGE, UsageRecord(seconds={"b" * 10_000: 1.0})),
        (Keys.SHARES, SharesRecord(weights={"bob": 1e-320})),
        (Keys.SHARES, SharesRecord(weights={"bob": 1e300})),
        (Keys.SHARES, SharesRecord(weights={"bob": -1.0})),
        (Keys.SHARES, SharesRecord(slice_s=1e308)),
        (Keys.SHARES, SharesRecord(half_life_s=0.0)),
    ],
)
def test_absurd_shares_and_use_decide_nothing(key: str, record: object) -> None:
    """They are set aside, every user counts alike, and jobs of all users are decided about."""
    view = view_of(HISTORY)
    put(view, Keys.USAGE, encode(UsageRecord(seconds={"bob": 50.0})), 10**6 - 2)
    for user in ("alice", "bob"):
        spec = SpecRecord(spec=small_spec(user), uid=user, submitted_by=f"{user}@host")
        put(view, Keys.of(user, "spec"), encode(spec), 10**6 - 1)
    put(view, key, encode(record))
    decision = decide(view, now=100.0)
    assert {command.job for command in decision.commands if command.job} >= {"alice", "bob"}
    assert not decision.broken
    assert key in view.unreadable


LONG_FACT = ReachFact(to="b", to_incarnation="b-1", port=Port.DAEMON, address="b:1", reason="no " * 10_000)


@pytest.mark.parametrize(
    ("key", "record"),
    [
        (Keys.reach("a"), ReachRecord(incarnation="a-1", facts=(LONG_FACT,))),
        (Keys.reach("a"), ReachRecord(incarnation="a-1", facts=(replace(LONG_FACT, reason="", address="b" * 10_000),))),
        (Keys.reach("a"), ReachRecord(incarnation="a-1", facts=(replace(LONG_FACT, reason=""),) * 20_001)),
        (Keys.node("a"), replace(NODE, site="x" * 10_000)),
        (Keys.node("a"), replace(NODE, workers=(WorkerPort(device_index=0, address="a:1", incarnation="w"),) * 2)),
        (Keys.node("a"), replace(NODE, workers=(WorkerPort(device_index=1, address="a:1", incarnation="w"),))),
    ],
)
def test_what_a_node_says_of_ports_has_an_end(key: str, record: object) -> None:
    """No reason fills a job's record, and nobody dials more workers of a node than it has devices."""
    view = ClusterView()
    put(view, key, encode(record))
    assert key in view.unreadable


def test_devices_of_a_job_that_is_set_aside_stay_its_own() -> None:
    """Both nodes are in use; the first job's plan becomes garbage: a third job gets no device of it."""
    view = view_of(HISTORY)
    put(view, Keys.of("first", "plan"), GARBAGE)
    put(view, Keys.of("third", "spec"), encode(SpecRecord(spec=small_spec("third"), uid="u")), 10**6 + 1)
    offered = [command for command in decide(view, now=100.0).commands if isinstance(command, Transaction)]
    assert not any(Keys.of("third", "next") in command.puts for command in offered)


def test_agents_leave_a_job_that_is_set_aside_as_it_is() -> None:
    """A worker computes a stage: it is not released, whichever key of the job is garbage."""
    plan = PlanRecord(generation=1, timeline=1)
    running = replace(RUNNING, goal=Goal(job="j"))
    for leaf in ("spec", "plan", "phase"):
        view = ClusterView()
        put(view, Keys.of("j", "spec"), encode(SpecRecord(spec=small_spec("j"))), 1)
        put(view, Keys.of("j", "plan"), encode(plan), 2)
        assert next_steps(view, node(running)), "without garbage the worker, which no plan names, is released"
        put(view, Keys.of("j", leaf), GARBAGE, 3)
        assert next_steps(view, node(running)) == []


def test_a_node_whose_record_is_garbage_is_absent_and_may_write_it_again() -> None:
    """Its jobs wait one lease for it; its own record brings it back; its death is quiet."""
    view = view_of(HISTORY)
    put(view, Keys.node("a"), GARBAGE)
    assert "a" not in view.nodes
    assert Keys.node("a") in view.unreadable
    soon, late = decide(view, now=2.0), decide(view, now=10.0)
    assert not any("recovering" in str(command) for command in soon.commands)
    assert any("recovering" in str(command) for command in late.commands)
    put(view, Keys.node("a"), encode(replace(NODE, name="a")), 10**6 + 1)
    assert "a" in view.nodes
    put(view, Keys.node("a"), GARBAGE, 10**6 + 2)
    put(view, Keys.node("a"), None, 10**6 + 3)
    assert not view.unreadable


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (replace(NODE, name="b"), "names itself node 'b'"),
        (replace(NODE, devices=(Device(kind="cpu", index=7),)), "its device 0 has index 7"),
        (replace(NODE, devices=(Device(kind="cpu", speed=0.0),)), "impossible speed"),
        (replace(NODE, devices=(Device(kind="cpu", speed=1e300),)), "impossible speed"),
        (replace(NODE, devices=(Device(kind="cpu", speed=5e-324),)), "impossible speed"),
        (replace(NODE, devices=(Device(kind="cpu", bfloat16_speed=1e300),)), "impossible speed"),
        (replace(NODE, devices=(Device(kind="cpu", memory_bytes=-1),)), "impossible speed or memory"),
        (replace(NODE, devices=(Device(kind="cpu", reserve_bytes=-1),)), "impossible speed or memory"),
        (replace(NODE, devices=(Device(kind="cpu", bfloat16_speed=-1.0),)), "impossible speed or memory"),
        (replace(NODE, worker_ports="x" * 10_000), "more than 8192 characters"),
        (replace(NODE, arithmetic_class="x" * 10_000), "more than 8192 characters"),
        (replace(NODE, ailments={"x" * 10_000: "probing"}), "more than 8192 characters"),
        (replace(NODE, devices=(Device(kind="cpu", model="x" * 10_000),)), "more than 8192 characters"),
        (replace(NODE, generations={"first": -1}), "impossible generation"),
        (replace(NODE, generations={"first": 2**63}), "impossible generation"),
    ],
)
def test_a_node_that_makes_no_sense_is_set_aside(record: NodeRecord, reason: str) -> None:
    """Well-formed, and poison for every plan."""
    view = ClusterView()
    put(view, Keys.node("a"), encode(record))
    assert not view.nodes
    assert reason in view.unreadable[Keys.node("a")].reason


def test_a_node_of_an_earlier_release_that_says_too_much_is_cut_short() -> None:
    """Its sentences for people had any length; the node itself is sound."""
    view, long = ClusterView(), "x" * 10_000
    put(view, Keys.node("a"), encode(replace(NODE, stays_out=long, worker_trouble=long, ailments={"probing": long})))
    assert not view.unreadable
    node = view.nodes["a"]
    assert {len(text) for text in (node.stays_out, node.worker_trouble, *node.ailments.values())} == {8192}
    assert replace(node, stays_out="", worker_trouble="", ailments={}) == NODE


def test_a_probe_that_makes_no_sense_is_set_aside() -> None:
    """No bytes a second: a plan would divide by it."""
    view, standstill = ClusterView(), LinkProbe(round_trip_s=0.1, bytes_per_s=0)
    put(view, Keys.probes("a"), encode(ProbeRecord(incarnation="a-1", peers={"b": standstill})))
    assert not view.probes


def test_two_spellings_of_one_key_do_not_take_turns() -> None:
    """`workers/1/0` beside `workers/00000001/0000`: the second is the daemons' own."""
    view = view_of(HISTORY)
    workers = dict(view.jobs["first"].workers)
    put(view, "/headway/jobs/first/workers/1/0", encode(next(iter(workers.values()))))
    put(view, "/headway/jobs/first/workers/1/0", None, 10**6 + 1)
    assert view.jobs["first"].workers == workers


def test_records_carry_the_version_of_their_format() -> None:
    """Absent means 1; a newer one is an error of its own; new fields alone are none."""
    raw = encode(PhaseRecord(reason="x"))
    assert msgspec.json.decode(raw)["format"] == 1
    assert decode(raw, PhaseRecord) == decode(msgspec.json.encode(PhaseRecord(reason="x")), PhaseRecord)
    assert decode(b'{"format":1,"reason":"x","new":3}', PhaseRecord).reason == "x"
    with pytest.raises(NewerFormatError, match="in format 2; this one reads up to 1"):
        decode(b'{"reason":"x","format":2}', PhaseRecord)


def test_a_key_that_is_no_text_comes_back_as_it_was() -> None:
    """There and back, in transactions too; printed, nothing of it reaches a terminal."""
    raw = b"/headway/\xff\x1b[2J"
    assert to_bytes(to_text(raw)) == raw
    request = transaction_request((Compare.absent(to_text(raw)),), (Put(to_text(raw), b""),))
    assert request.compare[0].key == request.success[0].request_put.key == raw
    assert printable_name(to_text(raw)) == "/headway/\\udcff\\u001b[2J"


@pytest.mark.parametrize(
    "times",
    [
        LayerTime(forward_s=0.0, backward_s=0.0),
        LayerTime(forward_s=1e308, backward_s=1.0),
        LayerTime(forward_s=0.1, backward_s=0.1, update_s=1e300),
        LayerTime(forward_s=0.1, backward_s=-0.1),
    ],
)
def test_a_profile_that_makes_no_sense_is_set_aside(times: LayerTime) -> None:
    """A plan would divide by no time, and lose its numbers with an endless one."""
    view = ClusterView()
    put(view, Keys.profile("j", "a", 0), encode(ProfileRecord(generation=1, layers={"block": times})))
    assert "times are impossible" in view.unreadable[Keys.profile("j", "a", 0)].reason


@pytest.mark.parametrize(
    "record",
    [
        ProgressRecord(generation=1, batch=1, loss=1.0, tokens_per_second=1e-320),
        ProgressRecord(generation=1, batch=1, loss=1.0, tokens_per_second=1e308),
        ProgressRecord(generation=1, batch=10**400, loss=1.0, tokens_per_second=1.0),
    ],
)
def test_absurd_progress_of_one_job_costs_no_report_of_another(record: ProgressRecord) -> None:
    """A report of all jobs would divide by it, and show none of them."""
    view = view_of(HISTORY)
    put(view, Keys.of("first", "progress"), encode(record))
    assert "are impossible" in view.unreadable[Keys.of("first", "progress")].reason
    lines = [report_line(report, now=100.0) for report in reports_in(view, view.jobs_in_order())]
    assert [line.partition(":")[0] for line in lines] == ["first", "second"]


def test_no_job_goes_on_above_an_absurd_generation() -> None:
    """The numbers in orders to workers have 64 bits, and those of a checkpoint 31."""
    view = view_of(HISTORY)
    put(view, Keys.retired("first"), encode(RetiredRecord(phase=Phase.FAILED, generation=2**31, since=1.0)))
    put(view, Keys.node("evil"), encode(replace(NODE, name="evil", generations={"first": 2**31})))
    assert set(view.unreadable) == {Keys.retired("first"), Keys.node("evil")}
    assert (view.known_generation_of_name("first"), view.retired_generation("first")) == (1, 0)


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
def test_nobody_revokes_a_name_that_every_certificate_bears(name: str) -> None:
    """Every daemon would refuse every other one, and whoever could restore the name."""
    view = ClusterView()
    put(view, Keys.revoked(name), encode(RevokedRecord(name=name, revoked_at=1.0)))
    assert not view.revoked
    assert "every certificate bears this name" in view.unreadable[Keys.revoked(name)].reason
