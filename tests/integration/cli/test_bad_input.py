"""Every slip gives one line that says what and where, the right exit code, no traceback, and leaves no process."""

import socket
from typing import Any

FOREIGN = "203.0.113.9"
"""An address of a range reserved for documentation: no machine has it."""


def refused(outcome: tuple[int, str, str], *, code: int, line: str) -> None:
    """The outcome is one line on stderr with this text, and this exit code."""
    found, _, err = outcome
    assert line in err, err
    assert found == code
    assert "Traceback" not in err
    assert err.startswith("headway: ")
    assert err.count("\n") == 1


def test_missing_data(program: Any) -> None:
    """[data] source names a folder without shards: refused before anything starts."""
    job = program.job()
    job.write_text(job.read_text().replace("shards", "nowhere"))
    refused(program.run("run", str(job), "--out", "out"), code=2, line="tiny.toml:data.source")
    assert program.leftovers() == []


def test_other_data_than_the_jobs(program: Any) -> None:
    """[data] sha256 insists on other data than the folder holds: refused with both hashes."""
    job = program.job()
    job.write_text(job.read_text().replace("[data]\n", f'[data]\nsha256 = "{"0" * 64}"\n'))
    refused(program.run("run", str(job), "--out", "out"), code=2, line="tiny.toml:data.sha256")


def test_unknown_key(program: Any) -> None:
    """A misspelt key is refused with the right one, by `run` as by `reference`."""
    job = program.job(more="mid_nodes = 2\n")
    for command in ("run", "reference"):
        outcome = program.run(command, str(job), "--out", "out")
        refused(outcome, code=2, line="tiny.toml:placement.mid_nodes: unknown key; did you mean `min_nodes`?")


def test_output_folder_that_is_a_file(program: Any) -> None:
    """--out names a file: one line, nothing started."""
    (program.folder / "out").write_text("")
    refused(program.run("run", str(program.job()), "--out", "out"), code=2, line="name another folder with --out")


def test_checkpoint_folder_that_cannot_be_used(program: Any) -> None:
    """[fault] checkpoint_dir is below a file: the job is refused before it trains, nothing is left running."""
    (program.folder / "file").write_text("")
    job = program.job(more=f'[fault]\ncheckpoint_dir = "{program.folder}/file/checkpoints"\n')
    refused(program.run("run", str(job), "--out", "out"), code=2, line="fault.checkpoint_dir")
    assert program.leftovers() == []


def test_port_in_use(program: Any) -> None:
    """--etcd-port is taken: `up` says which port, and leaves nothing."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(program.run("up", "--etcd-port", str(port)), code=2, line=f"port {port} is in use")
    assert program.leftovers() == []


def test_etcd_binary_that_is_not_there(program: Any) -> None:
    """--etcd-binary names nothing: one line with the flag."""
    refused(program.run("up", "--etcd-binary", "/nonexistent"), code=2, line="--etcd-binary")
    assert program.leftovers() == []


def test_a_running_cluster_and_its_bad_clients(standing: Any) -> None:
    """A name in use, a job that is not there, and a client without or with a foreign certificate: one line each."""
    program, etcd = standing, _endpoint(standing)
    assert program.run("certs", "ca", "stranger")[0] == 0
    without = program.start("jobs", "--etcd", etcd)  # these two try for as long as they are let
    stranger = program.start("jobs", "--etcd", etcd, "--certs", "ca/stranger")
    job = program.job(min_nodes=3)  # it waits for a third node
    assert program.run("submit", str(job))[0] == 0
    refused(program.run("submit", str(job)), code=2, line="job tiny: this name is in use")
    refused(program.run("jobs", "rm", "tiny"), code=2, line="headway cancel tiny")
    refused(program.run("export", "tiny", "--out", "out"), code=2, line="nothing to export yet")
    refused(program.run("status", "other"), code=2, line="there are tiny")
    refused(program.run("drain", "node-9"), code=2, line="these nodes are up: node-1")
    refused(program.ended(without), code=3, line="no client certificate")
    refused(program.ended(stranger), code=3, line=etcd)
    assert program.run("cancel", "tiny")[0] == 0


def test_daemons_that_cannot_start(program: Any) -> None:
    """An etcd that is not there, a port that is taken, an address of elsewhere: one line, exit codes 3, 2 and 3."""
    assert program.run("certs", "ca", "node")[0] == 0
    common = ("daemon", "--certs", "ca/node", "--name", "node", "--log-level", "error")
    lonely = program.start(*common, "--etcd", "127.0.0.1:1", "--state-dir", "lonely")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        refused(program.run(*common, "--listen", f"127.0.0.1:{port}", "--state-dir", "late"), code=2, line=port)
    for host in (("--advertise-host", FOREIGN), ("--listen", f"{FOREIGN}:7070")):
        refused(program.run(*common, *host, "--state-dir", "far"), code=3, line="advertise_host: ")
    refused(program.ended(lonely), code=3, line="127.0.0.1:1")
    assert program.leftovers() == []


def _endpoint(program: Any) -> str:
    import json

    content = json.loads((program.folder / ".headway" / "cluster.json").read_text())
    return str(content["etcd"][0])
