"""The output and the commands of failures: real clusters, driven by the command line alone."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def etcd_pids(program: Any) -> list[int]:
    """The etcd processes of this program's clusters."""
    return [pid for pid in program._marked() if Path(f"/proc/{pid}/comm").read_text().strip() == "etcd"]


def test_a_cluster_is_set_up_anew_from_nothing_but_a_checkpoint(program: Any, wait_until: Callable[..., None]) -> None:
    """A job pauses in a checkpoint; cluster and state folder are lost; `submit --from` goes on with it.

    Another job begins with the same checkpoint, says so and finishes; one whose model differs is refused with the key,
    and one with another length needs --change.
    """
    kept = program.folder / "kept"
    fault = f'[fault]\nsnapshot_every = 50\ncheckpoint_every = 0\ncheckpoint_dir = "{kept}"\n'
    job = program.job(batches=100_000, more=fault)
    up = program.up("--nodes", "2")
    code, out, err = program.run("submit", str(job), "--json")
    assert code == 0, err
    told = json.loads(out)
    assert (told["job"], told["boundary"], told["from"], told["changed"]) == ("tiny", 0, "", [])

    def has_passed(batch: int) -> bool:
        told = json.loads(program.run("status", "tiny", "--json")[1])
        return told["batch"] is not None and told["batch"] >= batch

    wait_until(lambda: has_passed(0), "a batch")
    code, _, err = program.run("pause", "tiny", "--wait")
    assert code == 0, err
    (found,) = json.loads(program.run("checkpoints", "tiny", "--json")[1])
    assert found["is_complete"]
    up.kill()
    up.communicate(timeout=30)
    shutil.rmtree(program.folder / ".headway")

    program.up("--nodes", "1")
    code, out, err = program.run("submit", "--from", str(kept / "tiny"))
    assert code == 0, err
    assert f"submitted from batch {found['boundary']} of tiny ({found['url']})" in out
    assert "unprotected: one node" in err
    wait_until(lambda: has_passed(found["boundary"]), "a batch after the checkpoint")
    told = json.loads(program.run("status", "tiny", "--json")[1])
    assert (told["phase"], told["parent"]) == ("running", f"tiny, boundary {found['boundary']}")
    assert program.run("cancel", "tiny")[0] == 0

    job = program.job(batches=found["boundary"] + 10, more=fault)
    child = job.read_text().replace('name = "tiny"', 'name = "child"')
    job.write_text(child.replace("hidden_size = 32", "hidden_size = 64"))
    code, _, err = program.run("submit", str(job), "--from", found["url"])
    assert code == 2
    assert "model.hidden_size: is 64, but the checkpoint of tiny has 32" in err
    job.write_text(child)
    code, _, err = program.run("submit", str(job), "--from", found["url"])
    assert code == 2
    assert f"train.batches 100000 → {found['boundary'] + 10}" in err
    code, out, err = program.run("submit", str(job), "--from", found["url"], "--change")
    assert code == 0, err
    assert "changed: train.batches 100000" in out
    assert f"Changed since tiny, boundary {found['boundary']}: train.batches" in program.run("events", "child")[1]
    assert program.run("watch", "child", "--json")[0] == 0
    told = json.loads(program.run("status", "child", "--json")[1])
    assert (told["phase"], told["parent"]) == ("finished", f"tiny, boundary {found['boundary']}")
    assert told["checkpoint_boundary"] == found["boundary"] + 10
    assert (Path(found["url"]) / "manifest.json").exists(), "what it began with is not its own to delete"


def test_status_is_answered_while_etcd_is_away(program: Any, wait_until: Callable[..., None]) -> None:
    """etcd stands still: `status` asks a daemon by itself and says so; `--daemon` asks one by its address."""
    program.up("--nodes", "2")
    job = program.job(batches=5, min_nodes=3)
    assert program.run("submit", str(job))[0] == 0
    addresses = json.loads((program.folder / ".headway" / "cluster.json").read_text())["daemons"]
    assert len(addresses) == 2
    code, out, err = program.run("status", "tiny", "--daemon", addresses[1], "--json")
    assert code == 0, err
    told = json.loads(out)
    assert told["asked"] in ("node-1", "node-2")
    assert (told["etcd"]["reachable"], told["jobs"][0]["phase"]) == (True, "queued")
    pids = etcd_pids(program)
    assert len(pids) == 1
    os.kill(pids[0], signal.SIGSTOP)
    try:
        wait_until(lambda: "etcd has been away for" in program.run("status", "tiny")[1], "a daemon that misses etcd")
        code, out, err = program.run("status", "tiny")
        assert code == 0, err
        assert "training continues" in out
        assert "tiny: its start" in out
        assert program.run("status", "nope")[0] == 2
    finally:
        os.kill(pids[0], signal.SIGCONT)


def test_a_drained_node_is_taken_back(program: Any, wait_until: Callable[..., None]) -> None:
    """`drain` marks a node for good; `nodes release` takes that back, and the daemon does not set it again."""
    program.up("--nodes", "2")

    def marked() -> list[str]:
        return [node["name"] for node in json.loads(program.run("nodes", "--json")[1]) if node["is_draining"]]

    assert program.run("drain", "node-2")[0] == 0
    assert marked() == ["node-2"]
    assert "is already draining" in program.run("drain", "node-2")[1]
    code, out, err = program.run("nodes", "release", "node-2")
    assert code == 0, err
    assert "no longer draining" in out
    job = program.job(batches=5, min_nodes=2)
    assert program.run("submit", str(job))[0] == 0
    assert program.run("watch", "tiny", "--json")[0] == 0, "both nodes are needed"
    assert marked() == []
    told = program.run("history", "tiny", "--json", "--from", "1")[1].splitlines()
    assert [json.loads(line)["batch"] for line in told[:-1]] == [1, 2, 3, 4], "the past of a job that is over"
    assert "is neither draining nor in quarantine" in program.run("nodes", "release", "node-2")[1]
    code, _, err = program.run("nodes", "release", "nowhere")
    assert code == 2
    assert "these nodes are up: node-1, node-2" in err
