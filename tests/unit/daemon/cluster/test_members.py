"""The members of etcd in people's spelling, alike for daemons and clients."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.client.cluster_access import CLUSTER_FILE, find_cluster
from headway.daemon.cluster.members import read_members
from headway.daemon.node.config import read_node_config


@pytest.mark.parametrize(
    ("told", "members"),
    [
        ("10.0.0.5:2379", ("10.0.0.5:2379",)),
        ("https://10.0.0.5:2379", ("10.0.0.5:2379",)),
        ("HTTPS://etcd.example:2379/", ("etcd.example:2379",)),
        ("a:1, https://b:2 ,c:3", ("a:1", "b:2", "c:3")),
        ("[fd00::5]:2379,https://[::1]:1", ("[fd00::5]:2379", "[::1]:1")),
    ],
)
def test_daemons_and_clients_read_the_same_members(told: str, members: tuple[str, ...]) -> None:
    """With https:// or without, by flag or variable, in a file's list too: host:port of each."""
    assert find_cluster(etcd=told, certs=Path("certs"), environment={}).etcd == members
    assert find_cluster(environment={"HEADWAY_ETCD": told, "HEADWAY_CERTS": "certs"}).etcd == members
    assert read_node_config(None, {"HEADWAY_ETCD": told}).etcd == members
    assert read_node_config(None, {}, {"etcd": (told,)}).etcd == members
    assert read_node_config(None, {}, {"etcd": tuple(told.split(","))}).etcd == members


def test_without_certificates_http_is_taken() -> None:
    """A client of an etcd without TLS may say so."""
    assert find_cluster(etcd="http://a:1,b:2", environment={}).etcd == ("a:1", "b:2")


NO_HOST_AND_PORT = ("", "etcd.example", "a:port", "a:0", "a:65536", ":2379", "a:1 b:2", "a:1/")
NO_IPV6 = ("fd00::5:2379", "[fd00::5:2379", "fd00::5]:2379", "[[fd00::5]]:2379", "[a]:1")
NO_URL = ("etcd://a:1", "://a:1", "https://a", "https://a:1/v3", "https://me@a:1")


@pytest.mark.parametrize("member", [*NO_HOST_AND_PORT, *NO_IPV6, *NO_URL])
def test_an_invalid_member_is_one_line(member: str) -> None:
    """Even next to a valid one. The line names the member and the setting."""
    with pytest.raises(ConfigError) as caught:
        read_members([f"good:1,{member}"], "HEADWAY_ETCD", has_certificates=True)
    assert str(caught.value).startswith(f"HEADWAY_ETCD: etcd member {member!r} is not host:port; commas stand between")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("told", [[], [""], [" , "]])
def test_no_member_at_all_is_one_line(told: list[str]) -> None:
    """An empty list, or nothing but commas."""
    with pytest.raises(ConfigError, match="etcd: name at least one host:port of etcd"):
        read_members(told, "etcd", has_certificates=True)


def test_a_scheme_has_to_fit_the_certificates(tmp_path: Path) -> None:
    """http:// with certificates, and a daemon always has some; https:// without: the line says what to write."""
    file = tmp_path / "d.toml"
    file.write_text('etcd = ["https://a:1", "http://b:2"]\n')
    questions: dict[str, Callable[[], object]] = {
        "--etcd": lambda: find_cluster(etcd="http://b:2", certs=Path("certs"), environment={}),
        "HEADWAY_ETCD": lambda: read_node_config(None, {"HEADWAY_ETCD": "http://b:2"}),
        str(file): lambda: read_node_config(file, {}),
    }
    for where, ask in questions.items():
        with pytest.raises(ConfigError, match=r"'http://b:2': http means no TLS, .*: write https; ") as caught:
            ask()
        assert caught.value.where == where
    with pytest.raises(ConfigError, match=r"HEADWAY_ETCD: .*'https://a:1': https needs certificates: .*HEADWAY_CERTS"):
        find_cluster(environment={"HEADWAY_ETCD": "https://a:1"})


@pytest.mark.parametrize("pids", [{"pid": 10**30}, {"pid": -1}, {"pid": 0}, {"pid": 1, "pids": {"node-1": -1}}])
def test_an_invalid_process_number_is_one_line(pids: dict[str, object], tmp_path: Path) -> None:
    """Chaos sends no signal to it: -1 would be every process of the machine."""
    found = {"etcd": ["127.0.0.1:1"], "certificates": "/x", **pids}
    (tmp_path / CLUSTER_FILE).write_text(json.dumps(found))
    with pytest.raises(ConfigError, match=r"cluster\.json: cannot be read: (Expected|Integer)"):
        find_cluster(cluster=tmp_path, environment={})
