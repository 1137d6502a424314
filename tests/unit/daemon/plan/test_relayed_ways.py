"""Which links lead through relays, and what such a link costs until it is measured, and then."""

from dataclasses import replace
from itertools import product

import pytest

from headway.daemon.cluster.measurements import LinkProbe
from headway.daemon.cluster.records import NodeRecord
from headway.daemon.plan.connections import LinkAssumptions, Links
from headway.daemon.plan.devices import DeviceSlot
from headway.daemon.plan.paths import NO_RELAYS, RelayedWays
from headway.daemon.plan.profiles import Profiles
from headway.stages.sockets.shared_port import listening_port, shared_address
from tests.rigs.clusters import node

RELAY = "relay:7070"
NEAR = replace(node("near"), address="near:7070")
HOST = replace(node("host"), address="host:7070")
FAR = replace(node("far"), address="host:7070,near:7070/far~")
AWAY = replace(node("away"), address=f"{RELAY}/away~")
NODES = (NEAR, HOST, FAR, AWAY)
WAYS = RelayedWays.of(NODES, NODES)


def links(found: dict[tuple[str, str], LinkProbe] | None = None) -> Links:
    return Links(LinkAssumptions(), Profiles.of(links=found or {}), relayed=WAYS)


def ends(one: NodeRecord, other: NodeRecord) -> tuple[DeviceSlot, DeviceSlot]:
    return DeviceSlot.of(one, 0), DeviceSlot.of(other, 0)


def probe(round_trip_s: float, bytes_per_s: float, loss: float = 0.0, *, via: str = "") -> LinkProbe:
    return LinkProbe(round_trip_s=round_trip_s, bytes_per_s=bytes_per_s, loss=loss, via=via)


@pytest.mark.parametrize(
    ("dialling", "dialled", "relay"),
    [
        (FAR, NEAR, ""),
        (FAR, HOST, ""),
        (NEAR, HOST, ""),
        (HOST, FAR, ""),  # at its own port
        (NEAR, FAR, "host:7070"),  # it has a port, yet dials the first relay
        (AWAY, FAR, "host:7070"),
        (FAR, AWAY, RELAY),
        (HOST, AWAY, RELAY),
        (FAR, FAR, ""),  # two devices of one node
    ],
)
def test_a_link_needs_a_relay_if_the_dialled_end_stands_by_elsewhere(
    dialling: NodeRecord, dialled: NodeRecord, relay: str
) -> None:
    assert WAYS.between(dialling.name, dialled.name) == relay


@pytest.mark.parametrize(("dialling", "dialled"), list(product(NODES, NODES)))
def test_the_rule_follows_the_port_that_a_worker_dials(dialling: NodeRecord, dialled: NodeRecord) -> None:
    """A link leads through a relay exactly if the first dialled port belongs to neither end."""
    if dialling is not dialled:
        dials = listening_port(shared_address(dialled.address, "0123456789"))
        is_own = dials in (dialling.address, dialled.address)
        assert WAYS.between(dialling.name, dialled.name) == ("" if is_own else dials)


def test_a_relay_has_its_name_if_it_is_a_node() -> None:
    assert [WAYS.via("near", "far"), WAYS.via("near", "away"), WAYS.via("far", "near")] == ["host", RELAY, ""]


def test_without_relays_all_is_as_before() -> None:
    assert RelayedWays.of((NEAR, HOST), NODES) is NO_RELAYS
    assert not NO_RELAYS
    assert WAYS


def test_the_links_of_replicas_and_of_a_tie_count_too() -> None:
    """The first of two replicas dials the second one, and the first stage of a tied embedding the last."""
    assert WAYS.num_relayed([["far"], ["near"], ["host"]], is_tied=True) == 0
    assert WAYS.num_relayed([["near", "far"]], is_tied=False) == 1
    assert WAYS.num_relayed([["far", "near"]], is_tied=False) == 0
    assert WAYS.num_relayed([["near"], ["host"], ["far"]], is_tied=False) == 0
    assert WAYS.num_relayed([["near"], ["host"], ["far"]], is_tied=True) == 1
    assert WAYS.num_relayed([["near"], ["far"]], is_tied=True) == 1


def test_until_it_is_measured_a_relayed_link_counts_as_two_far_ones() -> None:
    """Also inside a site, where a direct one counts as near."""
    assumed, relayed, direct = LinkAssumptions(), ends(NEAR, FAR), ends(FAR, NEAR)
    assert links().round_trip_s(*relayed) == 2 * assumed.far_round_trip_s
    assert links().bytes_per_s(*relayed) == assumed.far_bytes_per_s / 2
    assert links().round_trip_s(*direct) == assumed.site_round_trip_s
    assert links().bytes_per_s(*direct) == assumed.site_bytes_per_s
    assert not links().is_measured(*relayed)


def test_measured_ways_to_the_relay_and_on_make_the_relayed_one() -> None:
    """The round trips add up, and the slower way has the bandwidth."""
    found = links({("near", "host"): probe(0.02, 3e6, 0.01), ("host", "far"): probe(0.03, 5e6)})
    assert found.round_trip_s(*ends(NEAR, FAR)) == pytest.approx(0.05)
    assert found.bytes_per_s(*ends(NEAR, FAR)) == 3e6
    assert found.loss(*ends(NEAR, FAR)) == 0.01
    assert found.is_measured(*ends(NEAR, FAR))
    assert links({("near", "host"): probe(0.02, 3e6)}).bytes_per_s(*ends(NEAR, FAR)) == links().bytes_per_s(
        *ends(NEAR, FAR)
    )


def test_a_measurement_of_the_relayed_way_counts_before_those_of_its_parts() -> None:
    parts = {("near", "host"): probe(0.02, 3e6), ("host", "far"): probe(0.03, 5e6)}
    found = links({**parts, ("near", "far"): probe(0.2, 1e6, via="host:7070")})
    assert found.is_measured(*ends(NEAR, FAR))
    assert (found.round_trip_s(*ends(NEAR, FAR)), found.bytes_per_s(*ends(NEAR, FAR))) == (0.2, 1e6)


def test_the_round_trip_is_that_of_the_way_that_the_link_goes() -> None:
    """One node dials the other directly, and is dialled through the relay. Both bandwidths count: each is of the bytes
    that come to the node that measured.
    """
    found = links({("far", "near"): probe(0.01, 9e6), ("near", "far"): probe(0.2, 1e6, via="host:7070")})
    assert (found.round_trip_s(*ends(FAR, NEAR)), found.bytes_per_s(*ends(FAR, NEAR))) == (0.01, 1e6)
    assert (found.round_trip_s(*ends(NEAR, FAR)), found.bytes_per_s(*ends(NEAR, FAR))) == (0.2, 1e6)


def test_a_measurement_of_the_direct_way_does_not_measure_the_relayed_one() -> None:
    found = links({("far", "near"): probe(0.01, 9e6)})
    assert found.is_measured(*ends(FAR, NEAR))
    assert not found.is_measured(*ends(NEAR, FAR))
    assert found.round_trip_s(*ends(NEAR, FAR)) == links().round_trip_s(*ends(NEAR, FAR))


def test_a_measurement_of_another_way_than_the_present_one_does_not_count() -> None:
    """The node stood by at another relay, or at none, when it was measured."""
    for then in (RELAY, ""):
        found = links({("near", "far"): probe(0.2, 1e6, 0.5, via=then)})
        assert not found.is_measured(*ends(NEAR, FAR))
        assert found.round_trip_s(*ends(NEAR, FAR)) == links().round_trip_s(*ends(NEAR, FAR))
        assert found.bytes_per_s(*ends(NEAR, FAR)) == links().bytes_per_s(*ends(NEAR, FAR))
        assert found.loss(*ends(NEAR, FAR)) == 0.0
    direct = {("far", "near"): probe(0.2, 1e6, via=RELAY)}
    assert not links(direct).is_measured(*ends(FAR, NEAR))
    assert not Links(LinkAssumptions(), Profiles.of(links=direct)).is_measured(*ends(FAR, NEAR))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_links_through_one_relay_share_its_line(number: int) -> None:
    """Of n links each has an nth of the measured rate; direct links and those through other relays have no part."""
    found = links({("near", "far"): probe(0.01, 6e6, via="host:7070")})
    others = [("far", "near"), ("host", "far"), ("near", "away"), ("far", "away")]
    shared = found.shared_by([("near", "far")] * number + others)
    assert shared.bytes_per_s(*ends(NEAR, FAR)) == 6e6 / number
    assert shared.round_trip_s(*ends(NEAR, FAR)) == 0.01
    assert shared.bytes_per_s(*ends(FAR, NEAR)) == LinkAssumptions().site_bytes_per_s
    assert found.bytes_per_s(*ends(NEAR, FAR)) == 6e6, "of one plan, and not of the next"


def test_the_line_of_a_relay_is_as_fast_as_the_fastest_way_through_it() -> None:
    """A slower way has a narrow line of its own at one end, which no other link shares."""
    found = links(
        {("near", "far"): probe(0.01, 2e6, via="host:7070"), ("away", "far"): probe(0.01, 9e6, via="host:7070")}
    )
    rates = [found.shared_by([("near", "far")] * number).bytes_per_s(*ends(NEAR, FAR)) for number in (1, 3, 9)]
    assert rates == [2e6, 2e6, 1e6]


def test_links_through_a_relay_that_is_not_measured_share_what_is_assumed() -> None:
    shared = links().shared_by([("near", "far"), ("away", "far")])
    assert shared.bytes_per_s(*ends(NEAR, FAR)) == links().bytes_per_s(*ends(NEAR, FAR)) / 2


def test_where_both_dial_the_same_way_either_measurement_serves() -> None:
    """A node and its relay need none, whoever dials."""
    found = links({("far", "host"): probe(0.01, 9e6)})
    assert found.round_trip_s(*ends(HOST, FAR)) == found.round_trip_s(*ends(FAR, HOST)) == 0.01
