"""`status` shows what a failure would lose."""

from dataclasses import replace

from headway.daemon.records.format import decode, encode
from headway.daemon.records.keys import Keys
from headway.daemon.records.measurements import ProgressRecord
from headway.daemon.records.records import CheckpointRecord, PlanRecord, SpecRecord, StateFile, StateRecord
from headway.daemon.reports.job_report import report_job
from headway.daemon.reports.safety_report import SafetyReport, safety_lines, why_unprotected
from headway.daemon.reports.watch_view import LossHistory, snapshot
from headway.daemon.view.cluster_view import ClusterView
from tests.unit.daemon.cli.fake_cluster import SPEC, cluster_view

PARTS = (*SPEC.layers, "journal")


class Writer:
    """Changes the fake cluster's view."""

    def __init__(self) -> None:
        self.view: ClusterView = cluster_view()
        self._revision = 1000

    def put(self, key: str, record: object) -> None:
        """Set a key."""
        self._revision += 1
        self.view.apply(key, encode(record), mod_revision=self._revision, create_revision=self._revision)
        assert not self.view.unreadable

    def hold(self, boundary: int, node: str, parts: tuple[str, ...] = PARTS, trouble: str = "") -> None:
        """A node holds parts of a boundary of the plan's timeline."""
        files = {part: StateFile(size_bytes=1, checksum="x") for part in parts}
        record = StateRecord(incarnation=f"{node}-1", generation=3, files=files, trouble=trouble)
        self.put(Keys.state("demo", 1, boundary, node), record)

    def safety(self) -> SafetyReport:
        """Return the report of the job; 50 batches are done."""
        return report_job(self.view.jobs["demo"], self.view.nodes).safety


def test_a_boundary_counts_when_every_part_has_its_copies() -> None:
    """Boundary 20 lies on both nodes, 40 lacks the journal's copy: a failure would go back 30 batches."""
    cluster = Writer()
    for node in ("a", "b"):
        cluster.hold(20, node)
    cluster.hold(40, "a")
    cluster.hold(40, "b", SPEC.layers)
    found = cluster.safety()
    assert (found.restorable, found.copies, found.lag, found.unprotected) == ((20,), 2, 30, "")
    assert report_job(cluster.view.jobs["demo"], cluster.view.nodes).provisional_from == 20
    cluster.hold(40, "b")
    assert cluster.safety().restorable == (40, 20)
    assert cluster.safety().lag == 10
    assert safety_lines(cluster.safety()) == ["restorable: boundary 40, 20 (2 copies), 10 batches ago"]


def test_without_any_boundary_everything_would_be_lost() -> None:
    """50 batches are done, nothing is written, then a checkpoint is."""
    cluster = Writer()
    assert cluster.safety().lag == 50
    assert safety_lines(cluster.safety()) == ["restorable: nothing newer than 50 batches ago"]
    cluster.put(Keys.of("demo", "checkpoint"), CheckpointRecord(timeline=1, boundary=48, url="u"))
    found = cluster.safety()
    assert (found.lag, found.checkpoint_lag) == (2, 2)


def test_one_node_or_one_copy_is_unprotected() -> None:
    """The reason is told; with two nodes and two copies there is none."""
    nodes = cluster_view().nodes
    assert why_unprotected(SPEC, nodes) == ""
    assert why_unprotected(SPEC, {"a": nodes["a"]}).startswith("one node")
    assert why_unprotected(SPEC, {}) == "no node is up"
    alone = replace(SPEC, fault=replace(SPEC.fault, copies=1))
    assert why_unprotected(alone, nodes).startswith("copies = 1")
    without = replace(SPEC, fault=replace(SPEC.fault, snapshot_every=0))
    assert why_unprotected(without, nodes).startswith("snapshot_every = 0")


def test_trouble_and_rollbacks_are_shown() -> None:
    """A full checkpoint folder and the last rollback stand among the lines."""
    cluster = Writer()
    cluster.hold(20, "a", trouble="/mnt/full: cannot be written: No space left on device")
    plan = cluster.view.jobs["demo"].plan
    assert plan is not None
    back = replace(plan, generation=4, timeline=4, ancestry=((1, 20),), boundary=20, furthest=51, reason="node c died")
    assert decode(encode(back), PlanRecord) == back
    cluster.put(Keys.of("demo", "plan"), back)
    lines = safety_lines(cluster.safety())
    assert "rollbacks: 1; the last to boundary 20, 31 batches recomputed (node c died)" in lines
    assert any(line.startswith("warning: boundary 20 on a: /mnt/full") for line in lines)


def test_a_job_from_a_checkpoint_names_its_parent() -> None:
    """What was submitted says whose checkpoint it began with; later checkpoints of its own do not hide that."""
    cluster = Writer()
    assert report_job(cluster.view.jobs["demo"], cluster.view.nodes).parent == ""
    cluster.put(Keys.of("demo", "spec"), SpecRecord(spec=SPEC, parent="other, boundary 48"))
    cluster.put(Keys.of("demo", "checkpoint"), CheckpointRecord(timeline=1, boundary=60, url="u"))
    assert report_job(cluster.view.jobs["demo"], cluster.view.nodes).parent == "other, boundary 48"


def test_recomputed_batches_replace_the_old_ones_in_the_curve() -> None:
    """After a rollback from batch 49 to 40 the curve ends at 40, with the new loss."""
    cluster, history = Writer(), LossHistory()
    snapshot(cluster.view, "demo", history)
    assert [batch for batch, _ in history.points] == [48, 49]
    again = ProgressRecord(generation=4, batch=48, loss=9.0, tokens_per_second=1.0, recent=((48, 9.0),))
    cluster.put(Keys.of("demo", "progress"), again)
    shown = snapshot(cluster.view, "demo", history)
    assert shown is not None
    assert shown.losses == ((48, 9.0),)
