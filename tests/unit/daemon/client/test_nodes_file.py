"""A nodes file: what it says becomes nodes and links, what it gets wrong becomes one line that says where."""

import dataclasses
import tomllib
from pathlib import Path

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.client.nodes_file import GB, DeviceEntry, LinkEntry, NodeEntry, NodesFile, parse_nodes
from headway.daemon.plan.connections import LinkAssumptions
from headway.daemon.plan.devices import DeviceSlot
from headway.daemon.plan.layer_costs import CPU_FLOPS_PER_THREAD, CUDA_FLOPS
from headway.stages.spec import TrainSpec

EXAMPLE = Path(__file__).resolve().parents[4] / "docs" / "examples" / "nodes.toml"
TRAIN = TrainSpec(dtype="bfloat16", threads=2)
NODE = '[[nodes]]\nname = "a"\n'
TWO_SITES = '[[nodes]]\nname = "a"\nsite = "north"\n[[nodes]]\nname = "b"\nsite = "south"\n'


def read(text: str) -> NodesFile:
    return parse_nodes(text, "n.toml")


def test_the_example_is_what_it_says() -> None:
    """Four machines of three sites; the equal ones have numbers, devices their index, memory its bytes."""
    found = parse_nodes(EXAMPLE.read_text(), str(EXAMPLE))
    nodes = {node.name: node for node in found.records(TRAIN)}
    assert list(nodes) == ["berlin-1", "berlin-2", "paris", "attic"]
    assert [device.index for device in nodes["paris"].devices] == [0, 1]
    assert nodes["paris"].devices[0].bfloat16_speed == pytest.approx(400e12 / CUDA_FLOPS["bfloat16"])
    assert nodes["paris"].devices[0].speed == pytest.approx(45e12 / CUDA_FLOPS["float32"])
    assert (nodes["berlin-2"].devices[0].memory_bytes, nodes["berlin-2"].memory_bytes) == (48 * GB, 128 * GB)
    assert (nodes["attic"].devices[0].kind, nodes["attic"].memory_bytes) == ("cpu", 0)
    assert nodes["berlin-1"].arithmetic_class == nodes["berlin-2"].arithmetic_class != nodes["paris"].arithmetic_class


def test_the_example_has_every_key() -> None:
    """Somebody who copies it has seen all there is."""
    raw = tomllib.loads(EXAMPLE.read_text())
    devices = [device for node in raw["nodes"] for device in node.get("devices", [])]
    for entries, kind in ((raw["nodes"], NodeEntry), (devices, DeviceEntry), (raw["links"], LinkEntry)):
        assert {key for entry in entries for key in entry} == {item.name for item in dataclasses.fields(kind)}


def test_a_cpu_has_its_threads() -> None:
    """`tflops` of a CPU are of all threads that the job gives a worker."""
    found = read(NODE + '[[nodes.devices]]\nkind = "cpu"\ntflops = 1.2\n')
    assert found.records(TRAIN)[0].devices[0].speed == pytest.approx(1.2e12 / (2 * CPU_FLOPS_PER_THREAD["bfloat16"]))


def test_a_rate_of_one_dtype_alone_counts_for_the_other_relatively() -> None:
    """Nobody says how fast the other is: it is as much faster than the device of the estimates."""
    for key in ("tflops", "bfloat16_tflops"):
        device = read(NODE + f'[[nodes.devices]]\nkind = "cuda"\n{key} = 600.0\n').records(TRAIN)[0].devices[0]
        assert (device.speed, device.bfloat16_speed) == (2.0, 2.0)


def test_links_are_known_by_their_sites_either_way_round() -> None:
    """A named pair has its own numbers in both directions; every other pair is as the planner assumes it."""
    found = read(TWO_SITES + '[[links]]\nsites = ["south", "north"]\nmbit_s = 80\nround_trip_ms = 5\n')
    north, south = (DeviceSlot.of(node, 0) for node in found.records(TRAIN))
    links, assumed = found.link_assumptions(), LinkAssumptions()
    for one, other in ((north, south), (south, north)):
        assert links.round_trip_s(one, other) == pytest.approx(0.005)
        assert links.bytes_per_s(one, other) == pytest.approx(10e6)
    assert links.round_trip_s(north, north) == assumed.round_trip_s(north, north)
    assert links.bytes_per_s(south, south) == assumed.bytes_per_s(south, south)
    assert hash(links) == hash(found.link_assumptions())


DEVICE = NODE + "[[nodes.devices]]\n"
LINK = TWO_SITES + '[[links]]\nsites = ["north", "{}"]\nmbit_s = {}\nround_trip_ms = {}\n'
REFUSED = {  # what reads the file is held to all other mistakes by the tests of job files
    "": "n.toml: `nodes` is missing",
    "nodes = []": "n.toml:nodes: has no node",
    '[nodes]\nname = "a"': "n.toml:nodes: expected [[nodes]], an array of tables, got a table",
    NODE + "memory = 3": "n.toml:nodes[0].memory: unknown key; did you mean `memory_gb`?",
    DEVICE + "vram = 3": "n.toml:nodes[0].devices[0].vram: unknown key; there are kind",
    DEVICE + 'kind = "gpu"': "nodes[0].devices[0].kind: 'gpu' is not one of cpu, cuda; did you mean `cuda`?",
    '[[nodes]]\nname = ""': "n.toml:nodes[0].name: '' is not a node name",
    '[[nodes]]\nname = "a\\u001b[2J"': "n.toml:nodes[0].name: 'a\\x1b[2J' is not a node name",
    f'[[nodes]]\nname = "{"a" * 10_000}"': "n.toml:nodes[0].name: 'aaa",
    NODE + 'count = 2\n[[nodes]]\nname = "a-2"': "n.toml:nodes[1].name: 'a-2' is also a name of nodes[0]",
    NODE + f'site = "{"s" * 10_000}"': "n.toml:nodes[0].site: a site's name has 1 to 1024 printable",
    NODE + "count = 0": "n.toml:nodes[0].count: must be at least 1, is 0",
    NODE + "count = 10001": "n.toml:nodes[0].count: more than 10000 nodes",
    NODE + "memory_gb = 1e308": "n.toml:nodes[0].memory_gb: must be at most 1e+09, is 1e+308",
    NODE + "memory_gb = -1": "n.toml:nodes[0].memory_gb: must be at least 0, is -1",
    NODE + "devices = []": "n.toml:nodes[0].devices: a node without devices",
    DEVICE + "count = 1000000000": "n.toml:nodes[0].devices[0].count: no machine has more than 1024 devices",
    NODE + "[[nodes.devices]]\ncount = 600\n" * 2: "nodes[0].devices[1].count: no machine has more than 1024 devices",
    NODE + "count = 1000\n[[nodes.devices]]\ncount = 1024\n": "n.toml:nodes[0].count: more than 100000 devices in all",
    DEVICE + 'model = "a\\nb"': "devices[0].model: a model has at most 1024 printable characters",
    DEVICE + f'model = "{"m" * 10_000}"': "devices[0].model: a model has at most 1024 printable characters",
    DEVICE + "tflops = 1e308": "n.toml:nodes[0].devices[0].tflops: must be at most 1e+09, is 1e+308",
    DEVICE + "speed = 1e-320": "n.toml:nodes[0].devices[0].speed: must be 0 or at least 1e-06, is 1e-320",
    DEVICE + "speed = 2\ntflops = 3": "n.toml:nodes[0].devices[0].tflops: excludes `speed`",
    DEVICE + "tflops = 2\nfloat32_tflops = 3": "devices[0].float32_tflops: excludes `tflops`",
    LINK.format("south", "1e308", 1): "n.toml:links[0].mbit_s: must be at most 1e+09, is 1e+308",
    LINK.format("south", 0, 1): "n.toml:links[0].mbit_s: must be at least 1e-06, is 0",
    LINK.format("south", 1, "1e308"): "n.toml:links[0].round_trip_ms: must be at most 1e+09, is 1e+308",
    LINK.format("soth", 1, 1): "n.toml:links[0].sites: no node is of site 'soth'; did you mean `south`?",
    LINK.format('south", "north', 1, 1): "n.toml:links[0].sites: expected array of length 2",
    LINK.format("south", 1, 1) + '[[links]]\nsites = ["south", "north"]\nmbit_s = 1\nround_trip_ms = 1': (
        "n.toml:links[1].sites: links[0] is between the same sites"
    ),
}


@pytest.mark.parametrize(("text", "line"), REFUSED.items(), ids=REFUSED.values())
def test_a_mistake_is_one_line_that_says_where(text: str, line: str) -> None:
    """Each kind of mistake names its place and, where there is one, the nearest right name."""
    with pytest.raises(ConfigError) as refused:
        read(text)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("entry", "capability"),
    [
        ('kind = "cuda"', "8.6"),
        ('kind = "cuda"\ncapability = 7', "7.0"),
        ('kind = "cuda"\ncapability = 12.0', "12.0"),
        ('kind = "cpu"', ""),
    ],
)
def test_a_card_has_a_capability(entry: str, capability: str) -> None:
    """A card that says none computes bfloat16, and counts as one of the smaller."""
    assert read(f"{NODE}[[nodes.devices]]\n{entry}\n").records(TRAIN)[0].devices[0].capability == capability


def test_what_a_file_leaves_to_assumptions_is_told() -> None:
    """Cards without a rate, without a known memory, machines without a link: each is named, and what it counts as."""
    text = (
        '[[nodes]]\nname = "a"\ncount = 2\n'
        '[[nodes.devices]]\nkind = "cuda"\nmodel = "NVIDIA GeForce RTX 4060 Laptop GPU"\n'
        '[[nodes.devices]]\nkind = "cuda"\nmodel = "NVIDIA L4"\n[[nodes.devices]]\nkind = "cuda"\nspeed = 1.0\n'
        '[[nodes]]\nname = "b"\nsite = "far"\n'
    )
    assert read(text).assumed(dataclasses.replace(TRAIN, dtype="bfloat16")) == [
        "assumes 300 TFLOPS of NVIDIA GeForce RTX 4060 Laptop GPU, NVIDIA L4 (bfloat16_tflops)",
        "takes no time for elementwise work on NVIDIA GeForce RTX 4060 Laptop GPU, cards without `model` (memory_gb_s)",
        "assumes 8000 Mbit/s and 1 ms inside a site ([[links]])",
        "assumes 100 Mbit/s and 40 ms between sites ([[links]])",
    ]


def test_a_file_that_says_all_assumes_nothing() -> None:
    """A machine alone needs no link, and a card of a known model no memory's speed."""
    card = '[[nodes.devices]]\nkind = "cuda"\nmodel = "NVIDIA L4"\nfloat32_tflops = 20.0\n'
    assert read(f'[[nodes]]\nname = "a"\n{card}[[nodes]]\nname = "b"\nsite = "s"\n{card}{LINK}').assumed(TRAIN) == []


LINK = '[[links]]\nsites = ["s", "default"]\nmbit_s = 1000.0\nround_trip_ms = 1.0\n'
