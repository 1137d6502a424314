"""Releases of etcd that may lose commits: refused beyond one machine, told of on one."""

import sys
from pathlib import Path

import pytest

from headway.daemon.errors import ConfigError
from headway.daemon.etcd.binary import binary_release
from headway.daemon.etcd.releases import may_lose_commits, remark
from headway.daemon.node.config import NodeConfig
from headway.daemon.node.etcd_release import check_etcd_release


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("3.4.23", False),
        ("3.5.0", True),
        ("3.5.1", True),
        ("3.5.2", True),
        ("3.5.3", False),
        ("3.6.0", False),
        ("", False),
    ],
)
def test_three_releases_are_faulty(version: str, expected: bool) -> None:
    """3.5.0 to 3.5.2, and nothing else; a version that says nothing is not guessed at."""
    assert may_lose_commits(version) is expected
    assert bool(remark(version)) is expected


async def test_a_faulty_etcd_of_other_machines_is_refused() -> None:
    """A daemon whose etcd is elsewhere ends with what to do; on this machine, or accepted, it goes on."""
    far = NodeConfig(etcd=("127.0.0.1:2379", "192.0.2.5:2379"))
    with pytest.raises(ConfigError) as caught:
        await check_etcd_release("3.5.1", far)
    assert all(text in str(caught.value) for text in ("3.5.1", "192.0.2.5:2379", "3.5.3", "accept_faulty_etcd"))
    await check_etcd_release("3.5.9", far)
    await check_etcd_release("3.5.1", NodeConfig(etcd=("127.0.0.1:2379", "[::1]:2379")))
    await check_etcd_release("3.5.1", NodeConfig(etcd=far.etcd, accept_faulty_etcd=True))


def test_a_binary_says_its_release(tmp_path: Path) -> None:
    """As etcd prints it; a program that says something else has none."""
    binary = tmp_path / "etcd"
    binary.write_text("#!/bin/sh\nprintf 'etcd Version: 3.5.1\\nGit SHA: e8732fb5f\\n'\n")
    binary.chmod(0o755)
    assert binary_release(binary) == "3.5.1"
    assert binary_release(Path(sys.executable)) == ""
    assert binary_release(tmp_path / "nowhere") == ""
