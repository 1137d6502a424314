"""What a plan takes a card, and a link between two cards of one machine, to carry before anything is measured."""

from dataclasses import replace

import pytest

from headway.daemon.client.nodes_file import parse_nodes
from headway.daemon.cluster.records import Device
from headway.daemon.plan.card_rates import memory_gb_s_of
from headway.daemon.plan.connections import LinkAssumptions
from headway.daemon.plan.devices import DeviceSlot
from headway.daemon.plan.layer_costs import layer_costs, update_seconds
from headway.stages.spec import TrainSpec
from tests.rigs.clusters import job, node


@pytest.mark.parametrize(
    ("model", "least", "most"),
    [
        ("NVIDIA GeForce RTX 4090", 800, 1000),
        ("NVIDIA L40S", 700, 864),
        ("NVIDIA L4", 250, 300),
        ("NVIDIA H100 80GB HBM3", 2700, 3000),
        ("NVIDIA H100 PCIe", 1650, 2000),
        ("NVIDIA H200", 4000, 4800),
        ("NVIDIA H100 NVL", 3300, 3900),
        ("NVIDIA H20", 3300, 4000),
        ("NVIDIA GH200 480GB", 3300, 4000),
        ("NVIDIA A100-SXM4-40GB", 1300, 1555),
        ("NVIDIA A100-SXM4-80GB", 1700, 2039),
        ("NVIDIA A100 80GB PCIe", 1600, 1935),
        ("Tesla T4", 250, 320),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 0, 0),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 0, 0),
        ("a card of next year", 0, 0),
        ("", 0, 0),
    ],
)
def test_a_model_tells_its_bandwidth(model: str, least: float, most: float) -> None:
    assert least <= memory_gb_s_of(model) <= most


def test_a_4090_without_the_key_updates_by_its_own_bandwidth() -> None:
    """Twice as fast as the card of the estimates in float32, its memory is not: 12 bytes a parameter at 857 GB/s."""
    text = '[[nodes]]\nname = "a"\n[[nodes.devices]]\nkind = "cuda"\nmodel = "NVIDIA GeForce RTX 4090"\n'
    rates = "float32_tflops = 60.0\nbfloat16_tflops = 150.0\n"
    found, told = (
        parse_nodes(text + rates + key, "nodes.toml").records(TrainSpec())[0].devices[0]
        for key in ("", "memory_gb_s = 500.0\n")
    )
    assert found.memory_gb_s == pytest.approx(857, rel=0.01)
    assert told.memory_gb_s == 500.0
    embed = layer_costs(job())[0]
    moved = embed.update_bytes / update_seconds(replace(embed, update_flops=0.0), found, TrainSpec())
    assert moved == pytest.approx(857e9, rel=0.01)


def bytes_per_s(one: Device, other: Device, *, by_grpc: bool = False) -> float:
    """Of a link between two devices of one machine."""
    machine = replace(node("a"), devices=(one, replace(other, index=1)))
    slots = [DeviceSlot.of(machine, position) for position in range(2)]
    return LinkAssumptions().bytes_per_s(*slots, by_grpc=by_grpc)


def card(model: str, **fields: int) -> Device:
    return Device(kind="cuda", model=model, **fields)  # type: ignore[arg-type]


NVLINK, PCIE, MEMORY = 100e9, 10e9, 2e9


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3", NVLINK),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", NVLINK),
        ("NVIDIA H800", "NVIDIA H20", NVLINK),
        ("NVIDIA B200", "NVIDIA B200", NVLINK),
        ("NVIDIA H100 PCIe", "NVIDIA H100 PCIe", PCIE),
        ("NVIDIA H100 NVL", "NVIDIA H100 NVL", PCIE),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", PCIE),
        ("NVIDIA H100 80GB HBM3", "NVIDIA L40S", PCIE),
        ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090", PCIE),
        ("", "", PCIE),
    ],
)
def test_cards_of_one_machine_are_linked_by_what_their_models_have(one: str, other: str, expected: float) -> None:
    """NVLink if both have it, else PCIe; through the host's memory with gRPC, or where nodes share a card."""
    assert bytes_per_s(card(one), card(other)) == bytes_per_s(card(other), card(one)) == expected
    assert bytes_per_s(card(one), card(other), by_grpc=True) == MEMORY
    assert bytes_per_s(card(one, num_sharers=2), card(other)) == MEMORY


def test_cpus_of_one_machine_are_linked_by_its_memory() -> None:
    cpu = Device(kind="cpu")
    assert bytes_per_s(cpu, cpu) == bytes_per_s(cpu, card("NVIDIA H100")) == MEMORY
    slots = [DeviceSlot.of(replace(node("a", num_devices=2)), position) for position in range(2)]
    assert LinkAssumptions().round_trip_s(*slots) == 1e-4
