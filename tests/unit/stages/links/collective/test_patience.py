"""A collective link waits a limited time for a payload before the peer counts as silent."""

from datetime import timedelta

from headway.stages.links.collective.receiver import payload_patience


def test_a_large_frame_has_the_time_that_a_slow_network_takes() -> None:
    """Four GB of gradient sums at 1 Gbit/s are 32 s, more than the usual silence; a small frame has the silence."""
    silence = timedelta(seconds=30)
    assert payload_patience(silence, 4 << 30) > timedelta(seconds=32) + silence
    assert payload_patience(silence, 4 << 10) < silence + timedelta(milliseconds=1)
