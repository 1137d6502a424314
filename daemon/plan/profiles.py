"""Holds measurements of devices and links, and estimates what is not measured. Pure.

A layer's seconds on a device are those measured there. Blocks of which the backward computes a part again have times
of their own: where blocks were measured in another way, the estimate is scaled as theirs. Otherwise the estimate is
scaled twice. The first factor is the median of measured over estimated times of this kind of layer on other devices.
The second is the factor of this device's own other layers: a machine whose blocks take three times as long as elsewhere
is as slow with the head.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from statistics import median

from headway.daemon.cluster.measurements import LayerTime, LinkProbe
from headway.daemon.cluster.records import Device, DeviceKey
from headway.daemon.plan.layer_costs import LayerCost, microbatch_seconds, shareable_part, update_seconds
from headway.stages.spec import MIXING_HALF, MLP_HALF, TrainSpec

Layers = tuple[tuple[DeviceKey, tuple[tuple[str, LayerTime], ...]], ...]
"""Times by device and kind of layer, as in `timed_kind`; sorted."""
Ways = tuple[tuple[tuple[str, str], LinkProbe], ...]
"""Speeds by (node, peer); sorted."""


@dataclass(frozen=True)
class Profiles:
    """All measurements that a plan may use. Equal measurements are equal keys of a cache: see `of`."""

    layers: Layers = ()
    links: Ways = ()

    @classmethod
    def of(
        cls,
        layers: Mapping[DeviceKey, Mapping[str, LayerTime]] | None = None,
        links: Mapping[tuple[str, str], LinkProbe] | None = None,
    ) -> "Profiles":
        """Make profiles from mappings in any order."""
        return cls(
            layers=tuple(sorted((device, tuple(sorted(kinds.items(), key=_key))) for device, kinds in layers.items()))
            if layers
            else (),
            links=tuple(sorted(links.items(), key=itemgetter(0))) if links else (),
        )

    @cached_property
    def by_device(self) -> dict[DeviceKey, dict[str, LayerTime]]:
        """Return device to kind of layer to its seconds."""
        return {device: dict(kinds) for device, kinds in self.layers}

    @cached_property
    def by_link(self) -> dict[tuple[str, str], LinkProbe]:
        """Return (node, peer) to the link's speed."""
        return dict(self.links)

    def over(self, way_of: Callable[[str, str], str]) -> "Profiles":
        """Return these without measurements of other ways than those that links take now.

        way_of: the relay through which one node reaches another; empty: none.
        """
        present = tuple(way for way in self.links if way[1].via == way_of(*way[0]))
        return self if len(present) == len(self.links) else Profiles(self.layers, present)

    def link(self, one: str, other: str) -> LinkProbe | None:
        """Return the worse of both ends' measurements between two nodes; None: not measured."""
        found = [self.by_link[pair] for pair in ((one, other), (other, one)) if pair in self.by_link]
        if not found:
            return None
        return LinkProbe(
            round_trip_s=max(speed.round_trip_s for speed in found),
            bytes_per_s=min(speed.bytes_per_s for speed in found),
            loss=max(speed.loss for speed in found),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSeconds:
    """The seconds of one layer of a kind on a device."""

    forward_s: float
    """With the forwards of held-out microbatches, spread over all of them."""
    backward_s: float
    update_s: float
    shareable_s: float = 0.0
    """Part of the update that replicas of a stage can share."""

    @property
    def microbatch_s(self) -> float:
        """Return the seconds of forward and backward."""
        return self.forward_s + self.backward_s


class DeviceClock:
    """The seconds of each kind of layer, as in `timed_kind`, on each device of a job."""

    def __init__(
        self, costs: Mapping[str, LayerCost], train: TrainSpec, profiles: Profiles, devices: Mapping[DeviceKey, Device]
    ) -> None:
        """costs: by kind of layer. devices: those of the cluster; measurements of other devices do not count."""
        self._costs = costs
        self._train = train
        self._profiles = profiles
        computing = _Ratios(), _Ratios()
        for device, kinds in profiles.layers:
            if device not in devices:
                continue
            for kind, measured in kinds:
                if kind not in costs:
                    continue
                computing[0].add(
                    device,
                    layer_of(kind),
                    (measured.forward_s + measured.backward_s)
                    / microbatch_seconds(costs[kind], devices[device], train),
                )
                estimate = update_seconds(costs[kind], devices[device], train)
                if (
                    measured.update_s > 0 and estimate > 0
                ):  # frozen layers have no update, and shared ones no time of a whole one
                    computing[1].add(device, layer_of(kind), measured.update_s / estimate)
        self._microbatch, self._update = computing

    def seconds(self, node: str, device: Device, kind: str) -> KindSeconds:
        """Return the measured seconds, or the scaled estimate."""
        key = (node, device.index)
        measured = self._profiles.by_device.get(key, {}).get(kind)
        cost = self._costs[kind]
        if measured is not None:
            forward_s, microbatch_s = measured.forward_s, measured.forward_s + measured.backward_s
        else:
            ratio = self._microbatch.expected(key, layer_of(kind))
            microbatch_s = microbatch_seconds(cost, device, self._train) * ratio
        if measured is None or (kind == "head" and self._train.loss_chunk):  # its forward makes gradients too
            forward_s = microbatch_s * cost.forward_flops / (cost.forward_flops + cost.backward_flops)
        backward_s = microbatch_s - forward_s
        if measured is not None and measured.update_s > 0:
            update_s = measured.update_s
        else:
            update_s = update_seconds(cost, device, self._train) * self._update.expected(key, layer_of(kind))
        shareable_s = update_s * shareable_part(cost, device, self._train)
        forward_s *= 1 + self._train.evaluated_share
        return KindSeconds(forward_s=forward_s, backward_s=backward_s, update_s=update_s, shareable_s=shareable_s)


def layer_of(kind: str) -> str:
    """Return `embed`, `block` or `head` of a kind, however it is computed, and of which half a block."""
    return kind.partition("+")[0].removesuffix(f" {MIXING_HALF}").removesuffix(f" {MLP_HALF}")


class _Ratios:
    """Measured over estimated seconds, by device and `layer_of` a kind."""

    def __init__(self) -> None:
        self._of_kind: dict[str, dict[DeviceKey, float]] = {}

    def add(self, device: DeviceKey, kind: str, ratio: float) -> None:
        self._of_kind.setdefault(kind, {})[device] = ratio

    def expected(self, device: DeviceKey, kind: str) -> float:
        """Return the expected ratio for a kind: its own on that device, if it was measured there in any way."""
        if device in (measured := self._of_kind.get(kind, {})):
            return measured[device]
        medians = {name: median(ratios.values()) for name, ratios in self._of_kind.items()}
        if not medians:
            return 1.0
        own = [ratios[device] / medians[name] for name, ratios in self._of_kind.items() if device in ratios]
        return medians.get(kind, median(medians.values())) * (median(own) if own else 1.0)


def _key(item: tuple[object, object]) -> str:
    return str(item[0])
