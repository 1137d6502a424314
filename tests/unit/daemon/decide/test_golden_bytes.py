"""Records whose bytes must stay as they are, whatever classes they are made of: several releases read them."""

import pytest

from headway.daemon.cluster.format import UnreadableRecordError, decode, encode
from headway.daemon.cluster.measurements import LayerTime, LinkProbe, ProbeRecord, ProfileRecord
from headway.daemon.cluster.records import CheckpointRecord, PlanRecord, StateFile, StateRecord
from headway.stages.state.file_digest import FileDigest

GOLDEN = {
    b'{"format":1,"incarnation":"a-1","generation":3,"files":{"head":{"size_bytes":5,"checksum":"ab","is_durable":true},'
    b'"journal":{"size_bytes":7,"checksum":"cd","is_durable":false}},"trouble":"","lacks_access":false}': StateRecord(
        incarnation="a-1",
        generation=3,
        files={
            "head": StateFile(size_bytes=5, checksum="ab", is_durable=True),
            "journal": StateFile(size_bytes=7, checksum="cd"),
        },
    ),
    b'{"format":1,"timeline":2,"boundary":40,"url":"s3://b/c","files":{"head":{"size_bytes":5,"checksum":"ab"}},'
    b'"ancestry":[[1,20]],"arithmetic_classes":["cpu"],"was_rounded":false,"origin_job":"","earlier":[],'
    b'"dropped":[],"journal_parts":[],"written_at":0.0}': CheckpointRecord(
        timeline=2,
        boundary=40,
        url="s3://b/c",
        files={"head": FileDigest(size_bytes=5, checksum="ab")},
        ancestry=((1, 20),),
        arithmetic_classes=("cpu",),
    ),
    b'{"format":1,"generation":2,"layers":{"block":{"forward_s":0.1,"backward_s":0.2,"update_s":0.3,"spread":0.05}},'
    b'"peak_bytes":0,"num_samples":9,"replan_s":0.0,'
    b'"predicted_bytes":0,"demand":1.0,"device_kind":"","device_model":""}': ProfileRecord(
        generation=2,
        layers={"block": LayerTime(forward_s=0.1, backward_s=0.2, update_s=0.3, spread=0.05)},
        num_samples=9,
    ),
    b'{"format":1,"incarnation":"a-1",'
    b'"peers":{"b":{"round_trip_s":0.01,"bytes_per_s":1000.0,"loss":0.0,"via":""}}}': ProbeRecord(
        incarnation="a-1", peers={"b": LinkProbe(round_trip_s=0.01, bytes_per_s=1e3)}
    ),
}


@pytest.mark.parametrize("raw", GOLDEN, ids=[type(record).__name__ for record in GOLDEN.values()])
def test_a_record_keeps_its_bytes(raw: bytes) -> None:
    """A record is encoded to the bytes of earlier releases, and is read from them."""
    record = GOLDEN[raw]
    assert encode(record) == raw
    assert decode(raw, type(record)) == record


def test_a_checkpoint_of_an_earlier_release_has_no_journal_parts() -> None:
    """It was written before there were any: its journal has all rows."""
    raw = b'{"format":1,"timeline":2,"boundary":40,"url":"u","files":{},"earlier":[],"dropped":[]}'
    assert decode(raw, CheckpointRecord) == CheckpointRecord(timeline=2, boundary=40, url="u")


def test_a_plan_of_an_earlier_release_is_refused() -> None:
    """It named its workers otherwise, so this release would see a plan without any."""
    raw = b'{"format":1,"generation":3,"timeline":2,"stages":[]}'
    with pytest.raises(
        UnreadableRecordError, match="an earlier release wrote it, in format 1: pause the job with that"
    ):
        decode(raw, PlanRecord)
