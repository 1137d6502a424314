"""Every boundary that takes bytes from outside: what a fuzzer calls, and valid bytes to begin from.

A target raises nothing for any bytes: the boundary's own errors are the right answer, every other exception is a find.
"""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import inf, isfinite
from pathlib import Path

import torch

from headway.daemon.base.errors import ConfigError, RecoveryError, StoreUnreachableError
from headway.daemon.blobs.checkpoint import read_manifest
from headway.daemon.blobs.checkpoint_names import MANIFEST
from headway.daemon.client.cluster_access import CLUSTER_FILE, find_cluster
from headway.daemon.client.nodes_file import parse_nodes
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import (
    CheckpointRecord,
    EventRecord,
    NodeRecord,
    PhaseRecord,
    PlanRecord,
    SpecRecord,
    StateRecord,
    WorkerPart,
    WorkerRecord,
    WorkerState,
)
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.jobs.job_file import parse_job
from headway.daemon.models.model_folder import read_model
from headway.daemon.models.model_place import CONFIG_NAME
from headway.daemon.node.memory import GENERATIONS_FILE, NodeMemory
from headway.proto.data_pb2 import Hello
from headway.stages.data.shard_index import INDEX_NAME, read_index
from headway.stages.errors import DamagedFileError, DataError, ProtocolError
from headway.stages.ids import Batch, Boundary, Generation, MicrobatchIndex
from headway.stages.links.frame_codec import FrameAssembler, OutgoingFrame, bundle, heartbeat, unbundle
from headway.stages.links.frame_contract import DOWNSTREAM_KINDS, FrameContract
from headway.stages.links.link import Frame, FrameKind
from headway.stages.spec import ModelSpec, TrainSpec
from headway.stages.state.file_digest import FileDigest
from headway.stages.state.journal import Journal
from headway.stages.state.layer_file import read_journal
from headway.stages.state.state_file import ContentCheck, StateHeader, content_checksum, read_state, write_state
from tests.fuzz import certificate_targets, port_targets
from tests.integration.exactness.training import small_job

IN_MEMORY = Path("/dev/shm")
_folders: list[tempfile.TemporaryDirectory[str]] = []
"""Deleted when the process ends."""
ROOT = Path(__file__).resolve().parents[2]
GENERATION = Generation(4)
TRAIN = TrainSpec(microbatches=4, microbatch_size=2, sequence_length=3)


@dataclass(frozen=True, slots=True)
class Target:
    """One boundary."""

    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]


@cache
def scratch() -> Path:
    """A folder for the targets that read files; one for each process, which takes it along."""
    folder = tempfile.TemporaryDirectory(prefix="fuzz-", dir=IN_MEMORY if IN_MEMORY.is_dir() else None)
    _folders.append(folder)
    return Path(folder.name)


def _file(name: str, data: bytes) -> Path:
    path = scratch() / name
    path.write_bytes(data)
    return path


# --- Files of people ------------------------------------------------------------------------------------------------


def job_file(data: bytes) -> None:
    """A job's TOML."""
    try:
        parse_job(data.decode(errors="surrogateescape"), "job.toml")
    except ConfigError:
        return


def _job_files() -> list[bytes]:
    return [path.read_bytes() for path in sorted((ROOT / "docs/jobs").glob("*.toml"))]


def nodes_file(data: bytes) -> None:
    """The nodes of `headway plan --nodes-file`, with what is computed from them."""
    try:
        found = parse_nodes(data.decode(errors="surrogateescape"), "nodes.toml")
    except ConfigError:
        return
    devices = [device for node in found.records(TRAIN) for device in node.devices]
    assert all(isfinite(device.speed) and isfinite(device.bfloat16_speed) for device in devices)
    assert all(0 <= device.reserve_bytes <= device.memory_bytes for device in devices)
    assert all(0 < link.mbit_s < inf for link in found.links)


def cluster_file(data: bytes) -> None:
    """`cluster.json` of a local cluster."""
    _file(CLUSTER_FILE, data)
    try:
        find_cluster(etcd=None, certs=None, cluster=scratch())
    except (ConfigError, StoreUnreachableError):
        return


def model_config(data: bytes) -> None:
    """`config.json` of a model folder."""
    _file(CONFIG_NAME, data)
    try:
        read_model(scratch())
    except ConfigError:
        return


# --- State ----------------------------------------------------------------------------------------------------------


def layer_file(data: bytes) -> None:
    """A layer's file, read whole, checked in one pass, and checked while it arrives in pieces."""
    path = _file("layer.safetensors", data)
    for read in (read_state, content_checksum):
        try:
            read(path)
        except DamagedFileError:
            continue
    check = ContentCheck(path, len(data))
    try:
        for start in range(0, len(data), 100):
            check.update(data[start : start + 100])
        check.checksum()
    except DamagedFileError:
        return


def _layer_files() -> list[bytes]:
    header = StateHeader(job="job", layer="layer_0", boundary=20, timeline=1, dtype="fp32")
    path = scratch() / "seed.safetensors"
    write_state(path, {"w": torch.ones(2, 3), "steps": torch.tensor([7])}, header)
    return [path.read_bytes()]


def journal_file(data: bytes) -> None:
    """A journal."""
    try:
        read_journal(_file("journal.safetensors", data), job="job", boundary=Boundary(2))
    except DamagedFileError:
        return


def _journals() -> list[bytes]:
    tensors = Journal().tensors(below=Boundary(2))
    header = StateHeader(job="job", layer="journal", boundary=2, timeline=1, dtype="fp32")
    path = scratch() / "seed-journal.safetensors"
    write_state(path, tensors, header)
    return [path.read_bytes()]


def manifest(data: bytes) -> None:
    """A checkpoint's manifest."""
    _file(MANIFEST, data)
    try:
        read_manifest(str(scratch()))
    except RecoveryError:
        return


def _manifests() -> list[bytes]:
    files = {"embed": FileDigest(size_bytes=10, checksum="ab" * 16)}
    return [encode(CheckpointRecord(timeline=1, boundary=20, url="/tmp/x", files=files, ancestry=((1, 10),)))]


def token_index(data: bytes) -> None:
    """`shards.json` of a data folder."""
    _file(INDEX_NAME, data)
    try:
        read_index(scratch())
    except DataError:
        return


def generations(data: bytes) -> None:
    """Read a node's memory of generations."""
    folder = scratch() / "state"
    folder.mkdir(exist_ok=True)
    (folder / GENERATIONS_FILE).write_bytes(data)
    memory = NodeMemory(folder)
    try:
        memory.open()
    except ConfigError:
        return
    finally:
        memory.close()


# --- The wire -------------------------------------------------------------------------------------------------------


def _contract() -> FrameContract:
    return FrameContract.of(ModelSpec(hidden_size=8), TRAIN)


def frames(data: bytes) -> None:
    """A bundle of messages from a neighbour."""
    assembler = FrameAssembler("stage 0", generation=GENERATION, contract=_contract(), kinds=DOWNSTREAM_KINDS)
    try:
        for message in unbundle(data):
            assembler.feed(message)
    except (ProtocolError, ValueError):
        return


def _bundles() -> list[bytes]:
    forms = _contract().largest(FrameKind.ACTIVATION)
    tensors = tuple(torch.zeros(shape, dtype=dtype) for dtype, shape in forms)
    frame = Frame(FrameKind.ACTIVATION, GENERATION, Batch(0), MicrobatchIndex(0), tensors)
    said = [b"".join(message) for message in OutgoingFrame(frame, GENERATION, sequence=0).messages(lambda: 0)]
    said += [heartbeat(GENERATION, sequence=1, acknowledged=0)]
    said += [b"".join(message) for message in OutgoingFrame(None, GENERATION, sequence=1).messages(lambda: 0)]
    return [b"".join(map(bundle, said))]


def hello(data: bytes) -> None:
    """The first message of a link."""
    from google.protobuf.message import DecodeError

    try:
        Hello.FromString(data)
    except DecodeError:
        return


def _hellos() -> list[bytes]:
    said = Hello(protocol=4, job="job", generation=4, incarnation="a", expected_incarnation="b", stage=1, worker=1)
    return [said.SerializeToString()]


# --- etcd -----------------------------------------------------------------------------------------------------------


def records(data: bytes) -> None:
    """`key NUL value` lines, separated by two NULs, as keys below the prefix come and go."""
    view = ClusterView()
    for revision, line in enumerate(data.split(b"\0\0"), start=1):
        key, is_there, value = line.partition(b"\0")
        text = "/headway/" + key.decode(errors="surrogateescape")
        view.apply(text, value if is_there else None, mod_revision=revision, create_revision=revision, now=1.0)


def _records() -> list[bytes]:
    spec = small_job("job")
    node = NodeRecord(
        name="node-1",
        incarnation="x",
        address="127.0.0.1:7070",
        host="127.0.0.1",
        site="here",
        devices=(),
        memory_bytes=1,
        arithmetic_class="cpu",
    )
    stage = WorkerPart(node="node-1", node_incarnation="x", device_index=0, layers=spec.layers, depth=1)
    worker = WorkerRecord(node="node-1", incarnation="w", address="127.0.0.1:1", pid=1, state=WorkerState.RUNNING)
    entries: dict[str, object] = {
        Keys.node("node-1"): node,
        Keys.of("job", "spec"): SpecRecord(spec=replace(spec)),
        Keys.of("job", "phase"): PhaseRecord(),
        Keys.of("job", "plan"): PlanRecord(generation=1, timeline=1, workers=(stage,)),
        Keys.worker("job", 1, 0): worker,
        f"{Keys.job('job')}state/1/20/node-1": StateRecord(incarnation="x", generation=1),
        f"{Keys.job('job')}events/1": EventRecord(at=0.0, text="began", generation=1),
    }
    entries |= certificate_targets.entries()
    lines = [f"{key.removeprefix('/headway/')}\0".encode() + encode(record) for key, record in entries.items()]
    return [b"\0\0".join(lines), *lines]


TARGETS: dict[str, Target] = {
    "job file": Target(job_file, _job_files),
    "nodes file": Target(nodes_file, lambda: [(ROOT / "docs/examples/nodes.toml").read_bytes()]),
    "cluster file": Target(
        cluster_file,
        lambda: [json.dumps({"pid": 1, "etcd": ["127.0.0.1:1"], "certificates": "/tmp", "daemons": []}).encode()],
    ),
    "model config": Target(model_config, lambda: [b'{"model_type": "llama", "hidden_size": 32}']),
    "layer file": Target(layer_file, _layer_files),
    "journal": Target(journal_file, _journals),
    "manifest": Target(manifest, _manifests),
    "token index": Target(token_index, lambda: [b'{"format": 1, "dtype": "uint8", "shards": [], "sha256": ""}']),
    "generations": Target(generations, lambda: [b'{"job": 3, "job/uid": 3}']),
    "frames": Target(frames, _bundles),
    "hello": Target(hello, _hellos),
    "records": Target(records, _records),
    "opening": Target(port_targets.opening, port_targets.openings),
    "port": Target(port_targets.port, port_targets.openings),
    "relayed": Target(port_targets.relayed, port_targets.calls),
    "orders": Target(port_targets.orders, port_targets.order_lines),
    "control messages": Target(port_targets.control_messages, port_targets.messages),
    "invitation": Target(certificate_targets.invitation, certificate_targets.invitations),
    "join request": Target(certificate_targets.join_request, certificate_targets.join_requests),
    "signing request": Target(certificate_targets.signing, certificate_targets.signings),
    "join answer": Target(certificate_targets.join_answer, certificate_targets.join_answers),
    "join token": Target(certificate_targets.token, certificate_targets.tokens),
    "certificate": Target(certificate_targets.certificate, certificate_targets.certificates),
}
