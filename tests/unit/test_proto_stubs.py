"""The generated stubs that are checked in belong to the .proto files beside them."""

import subprocess
import sys
from pathlib import Path

import pytest

from headway.proto import etcd_pb2

PROTO = Path(__file__).resolve().parents[2] / "proto"
NAMES = sorted(path.stem for path in PROTO.glob("*.proto"))


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make proto` would write now, in a folder of its own."""
    out = tmp_path_factory.mktemp("stubs")
    options = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    files = [f"headway/proto/{name}.proto" for name in NAMES]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-Iheadway/proto={PROTO}", *options, *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return out / "headway" / "proto"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("suffix", ["_pb2.py", "_pb2.pyi", "_pb2_grpc.py"])
def test_checked_in_stub_is_what_the_proto_generates(regenerated: Path, name: str, suffix: str) -> None:
    """Somebody edits a .proto and forgets `make proto`: the stub differs from a fresh one."""
    assert (PROTO / f"{name}{suffix}").read_text() == (regenerated / f"{name}{suffix}").read_text()


def test_etcd_methods_have_the_paths_that_an_etcd_serves() -> None:
    """A renamed package or service would compile and then be refused by every etcd: the paths are fixed."""
    services = etcd_pb2.DESCRIPTOR.services_by_name
    paths = {f"/{service.full_name}/{method.name}" for service in services.values() for method in service.methods}
    assert {"/etcdserverpb.KV/Txn", "/etcdserverpb.Watch/Watch", "/etcdserverpb.Lease/LeaseKeepAlive"} <= paths


def test_etcd_field_numbers_that_are_easy_to_get_wrong() -> None:
    """etcd's wire format skips numbers: the events of a watch are field 11, the range of a comparison field 64."""
    assert etcd_pb2.WatchResponse.DESCRIPTOR.fields_by_name["events"].number == 11
    assert etcd_pb2.Compare.DESCRIPTOR.fields_by_name["range_end"].number == 64
    assert etcd_pb2.KeyValue.DESCRIPTOR.fields_by_name["lease"].number == 6
