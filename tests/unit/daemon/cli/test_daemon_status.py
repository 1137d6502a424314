"""A daemon's report while etcd is away, and the view of nodes that failed."""

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from headway.daemon.client.job_requests import DaemonStatus
from headway.daemon.errors import ConfigError
from headway.daemon.records.cluster_records import LeaderRecord, NodeFailureRecord
from headway.daemon.records.format import encode
from headway.daemon.records.keys import Keys
from headway.daemon.records.records import Phase, PhaseRecord
from headway.daemon.reports.node_list import node_lines, plain_sites
from headway.daemon.serving.status_report import status_reply
from tests.unit.daemon.cli.fake_cluster import cluster_view


def told(reply: Any) -> DaemonStatus:
    """The reply as the command line takes it."""
    return DaemonStatus(
        node=reply.node,
        etcd_reachable=reply.etcd_reachable,
        etcd_away_s=reply.etcd_away_s,
        waits_for=reply.waits_for,
        jobs=msgspec.json.decode(reply.jobs),
    )


def test_reports_survive_the_way_over_the_wire() -> None:
    """The report of the running job is what `status` shows from etcd; a job that nobody knows is named."""
    status = told(status_reply(cluster_view(), node="a", away_s=None))
    report = status.report("demo")
    assert (report.phase, report.batch, [stage.node for stage in report.stages]) == ("running", 49, ["a", "b"])
    assert status.line == "node a reaches etcd"
    with pytest.raises(ConfigError, match="node a knows demo, broken"):
        status.report("nope")
    assert list(told(status_reply(cluster_view(), node="a", away_s=None, job="demo")).jobs) == ["demo"]


def test_status_says_what_waits_for_etcd() -> None:
    """It names a recovering job, and says that training continues."""
    view = cluster_view()
    view.apply(
        Keys.of("demo", "phase"), encode(PhaseRecord(phase=Phase.RECOVERING)), mod_revision=1000, create_revision=1
    )
    line = told(status_reply(view, node="a", away_s=75.0)).line
    assert line.startswith("etcd has been away for 1:15, says node a; training continues; these wait for etcd: ")
    assert "demo: its recovery" in line


def test_failures_are_listed_below_their_node() -> None:
    """Of a node that is up and of one that is gone, with the way to forget them."""
    view = cluster_view()
    for number, node in enumerate(("b", "gone")):
        record = NodeFailureRecord(at=1.0, text="worker cpu:0 was killed by signal 9")
        view.apply(Keys.failure(node, 1), encode(record), mod_revision=1000 + number, create_revision=1000)
    lines = node_lines(view)
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == ["a", "b", "gone"]
    assert any("1 failure within 10 minutes" in line for line in lines if line.startswith("b "))
    assert sum("killed by signal 9" in line for line in lines) == 2
    assert any("headway nodes release gone" in line for line in lines)


def test_a_worker_that_does_not_start_is_listed_below_its_node() -> None:
    """The reason comes from the node's record; only that device counts as down."""
    view, trouble = cluster_view(), "worker cpu:0 does not start: port 7100 at 10.0.0.7 is in use"
    record = replace(view.nodes["b"], down_devices=(0,), worker_trouble=trouble)
    view.apply(Keys.node("b"), encode(record), mod_revision=1000, create_revision=1)
    lines = node_lines(view)
    assert lines[lines.index(f"    {trouble}") - 1].startswith("b ")


def test_a_private_site_is_shown() -> None:
    """Where links may be plain, `nodes` says so for each node and `doctor` once."""
    view = cluster_view()
    assert plain_sites(view) == "no plain links between machines"
    record = replace(view.nodes["b"], site="hall", site_is_private=True)
    view.apply(Keys.node("b"), encode(record), mod_revision=1000, create_revision=1)
    assert plain_sites(view) == "plain links between machines of site hall"
    private = [line for line in node_lines(view) if "private: its machines may have plain links" in line]
    assert [line.split()[0] for line in private] == ["b"]


def test_a_quarantined_node_says_so() -> None:
    """Three failures count: plans leave it out. With two it is only listed."""
    view = cluster_view()
    for number in (1, 2):
        record = encode(NodeFailureRecord(at=1.0, text="lost"))
        view.apply(Keys.failure("b", number), record, mod_revision=1000 + number, create_revision=1000)
    assert not any("quarantined" in line for line in node_lines(view))
    view.apply(Keys.failure("b", 3), record, mod_revision=1003, create_revision=1003)
    assert sum("quarantined: plans leave it out" in line for line in node_lines(view)) == 1


def test_errors_of_one_job_are_listed_and_leave_no_node_out() -> None:
    """Three times the same job: listed. The leader's own limit counts, and who charges the node is said."""
    view = cluster_view()
    for number, job in enumerate(("a", "a", "a", "b")):
        record = NodeFailureRecord(at=1.0, text=f"its worker failed in job {job}", job=job, is_jobs_error=True)
        view.apply(Keys.failure("b", number), encode(record), mod_revision=1000 + number, create_revision=1000)
    assert sum("its worker failed in job" in line for line in node_lines(view)) == 4
    assert not any("quarantined" in line for line in node_lines(view))
    strict = LeaderRecord(node="b", incarnation="b-1", quarantine_after=2)
    view.apply(Keys.LEADER, encode(strict), mod_revision=2000, create_revision=1)
    [told] = [line for line in node_lines(view) if "quarantined" in line]
    assert told == "    quarantined: plans leave it out while 2 failures count; it has errors of jobs a and b"
    view.apply(Keys.LEADER, encode(replace(strict, quarantine_after=0)), mod_revision=2001, create_revision=1)
    assert not any("quarantined" in line for line in node_lines(view))


def test_nodes_as_json_have_their_failures(headway: Any, fake_cluster: Any) -> None:
    """`nodes --json`: each record with its failures."""
    _, out, _ = headway("nodes", "--json")
    assert [found["failures"] for found in json.loads(out)] == [[], []]


def test_days_of_an_authority_that_exists_are_refused(tmp_path: Any, headway: Any) -> None:
    """`certs --days` counts for a new authority only; it is not silently ignored later."""
    assert headway("certs", str(tmp_path / "ca"), "a", "--days", "10")[0] == 0
    code, _, err = headway("certs", str(tmp_path / "ca"), "b", "--days", "20")
    assert code == 2
    assert "leave --days out" in err
    assert headway("certs", str(tmp_path / "ca"), "b")[0] == 0
