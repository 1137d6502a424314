"""A checkpoint folder that refuses files is told of in every list of jobs, and by one event when it begins and ends."""

from dataclasses import replace

from headway.daemon.cluster.format import decode, encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import StateRecord
from headway.daemon.jobs.job import FaultSpec
from headway.daemon.reports.cluster_picture import job_row
from headway.daemon.reports.job_report import report_in, report_line
from tests.rigs.recovery import trained
from tests.rigs.scenarios import events
from tests.rigs.simulated_cluster import SimulatedCluster

FULL = "/mnt/full: cannot be written: No space left on device"
TOLD = f"checkpoints fail on a and b: {FULL}; free space there: the nodes try again by themselves"


def refuse(cluster: SimulatedCluster, trouble: str) -> None:
    """Both nodes tell this of every boundary that they hold, and the leader looks."""
    prefix = Keys.job("first") + "state/"
    for key in [key for key in cluster.store.values if key.startswith(prefix)]:
        record = decode(cluster.store.values[key], StateRecord)
        files = {part: replace(file, is_durable=False) for part, file in record.files.items()}
        node = cluster.nodes[key.rsplit("/", 1)[-1]]
        cluster.store.transact({}, {key: encode(replace(record, files=files, trouble=trouble))}, lease=node.lease)
    cluster.elect()
    for _ in range(4):
        cluster.deliver(cluster.nodes[cluster.leader])
        cluster.lead()


def test_a_full_folder_is_one_event_and_its_end_another() -> None:
    """However often the copies are tried again; and a newer checkpoint ends it, without a word once it is told."""
    cluster = trained("a", "b", batches=12, fault=FaultSpec(snapshot_every=4, checkpoint_every=20))
    before = len(events(cluster))
    for _ in range(3):
        refuse(cluster, FULL)
    assert events(cluster)[before:] == [TOLD[0].upper() + TOLD[1:]]
    view = cluster.truth()
    report = report_in(view, view.jobs["first"])
    assert job_row(report).why.endswith(f" · {TOLD}")
    assert report_line(report, now=0.0).endswith(f" · {TOLD}")
    refuse(cluster, "")
    assert len(events(cluster)) == before + 1, "that no copy has failed yet does not say that one has succeeded"
    cluster.calm(until=lambda: Keys.of("first", "checkpoint") in cluster.store.values)
    cluster.calm(max_rounds=3)
    assert events(cluster)[before + 1 :] == ["Checkpoints are written again"]
