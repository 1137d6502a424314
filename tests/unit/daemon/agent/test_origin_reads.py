"""How far a node has read a model's folder, over all parts that are being read."""

from headway.daemon.agent.files import OriginReads
from headway.daemon.cluster.measurements import ReadingRecord
from headway.daemon.cluster.state_key import ORIGIN_PLACE, StateKey

ONE, OTHER = (StateKey("j", *ORIGIN_PLACE, layer) for layer in ("embed", "head"))


def test_parts_count_together_until_the_last_has_ended() -> None:
    """Two parts of 10 and 30 bytes: what is left only shrinks, also as one of them ends."""
    reads = OriginReads()
    assert reads.of("j") is None
    with reads.reading("j", OTHER, url="u", size_bytes=30) as other:
        with reads.reading("j", ONE, url="u", size_bytes=10) as one:
            one.reached(4)
            assert reads.of("j") == ReadingRecord(num_bytes=4, total_bytes=40, url="u")
            one.reached(10)
        other.reached(5)
        assert reads.of("j") == ReadingRecord(num_bytes=15, total_bytes=40, url="u")
        assert reads.of("another") is None
    assert reads.of("j") is None


def test_silence_counts_from_the_last_byte_of_any_part() -> None:
    """13 s without a byte are told as 10, and no silence once a byte comes."""
    now = 100.0
    reads = OriginReads(lambda: now)
    with reads.reading("j", ONE, url="u", size_bytes=10) as one:
        now += 4.9
        assert reads.of("j") == ReadingRecord(num_bytes=0, total_bytes=10, url="u")
        now += 8.1
        assert reads.of("j") == ReadingRecord(num_bytes=0, total_bytes=10, url="u", silent_s=10.0)
        one.reached(1)
        assert reads.of("j") == ReadingRecord(num_bytes=1, total_bytes=10, url="u")


def test_a_part_that_begins_again_after_it_failed_counts_once() -> None:
    """The second attempt replaces the first, while another part is still being read."""
    reads = OriginReads()
    with reads.reading("j", OTHER, url="u", size_bytes=30):
        with reads.reading("j", ONE, url="u", size_bytes=10) as one:
            one.reached(9)
        with reads.reading("j", ONE, url="u", size_bytes=10):
            assert reads.of("j") == ReadingRecord(num_bytes=0, total_bytes=40, url="u")
