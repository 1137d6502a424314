"""The output and the exit codes of the command line."""

import json
import os
import re
import resource
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from headway.daemon.base import interrupts
from headway.daemon.base.errors import ConfigError, ConflictError, JobFailedError, StoreUnreachableError
from headway.daemon.cli.program import program, run
from headway.daemon.client.job_requests import resume
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import Phase, PhaseRecord
from tests.rigs.fake_cluster import cluster_view

ROOT = Path(__file__).resolve().parents[4]
Headway = Callable[..., tuple[int, str, str]]

HEAVY = {"torch", "numpy", "matplotlib", "fsspec", "headway.daemon.plan.planner"}
HEAVY_FOR_A_WORD = HEAVY | {"grpc", "rich.live", "cryptography", "asyncio", "headway.daemon.cluster.records"}


def command_names() -> list[list[str]]:
    """Every command, subcommands included, as words."""
    words: list[list[str]] = []
    for name, command in program().commands.items():
        words.append([name])
        words += [[name, inner] for inner in getattr(command, "commands", {})]
    return words


@pytest.mark.parametrize(
    ("words", "code", "heavy", "most_s"),
    [
        (["--help"], 0, HEAVY_FOR_A_WORD, 0.5),
        (["jbos"], 2, HEAVY_FOR_A_WORD, 0.5),
        (["jobs"], 0, HEAVY, 1.0),
        (["status"], 0, HEAVY, 1.0),
    ],
    ids=("help", "a typo", "jobs", "status"),
)
def test_a_command_starts_fast(words: list[str], code: int, heavy: set[str], most_s: float) -> None:
    """In a fresh interpreter, without what only training needs. The cluster of `jobs` and `status` is empty.

    Half a second of processor time is promised, and bench/startup.py measures it: tests that run beside may double it.
    """
    script = (
        "import sys\nfrom headway.daemon.cli.options import Where\nfrom headway.daemon.cli.program import run\n"
        "def view(where):\n    from headway.daemon.client.cluster_access import ClusterView\n    return ClusterView()\n"
        f"Where.view = view\ncode = run({words!r})\n"
        f"print('LOADED', *sorted({heavy!r} & set(sys.modules)))\nsys.exit(code)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert (done.returncode, done.stdout.splitlines()[-1]) == (code, "LOADED"), done.stderr
    assert min(seconds) < most_s


def test_a_job_is_submitted_without_torch() -> None:
    """What `submit` reads of the data, and all that `run` needs to refuse a job file, imports no torch."""
    code = (
        "import sys, headway.daemon.local.run\nfrom headway.daemon.jobs.resolve import resolve_job\n"
        "from headway.stages.data.shard_index import read_index\nprint('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("words", command_names(), ids=" ".join)
def test_every_command_explains_itself_with_an_example(words: list[str], headway: Headway) -> None:
    """`headway COMMAND --help` ends well and has a line that can be typed."""
    code, out, _ = headway(*words, "--help")
    assert code == 0
    typed = " ".join(["headway", *words])
    usage, *rest = out.split("\n\n", 1)
    assert typed in usage
    group = words in (["config"], ["data"])
    assert group or any(line.strip().startswith(typed + " ") for line in rest[0].splitlines()), out


def test_every_command_that_answers_takes_json() -> None:
    """All but those that run until they are told to end, and groups that do nothing by themselves."""
    without = set()
    for words in command_names():
        command = program()
        for word in words:
            command = command.commands[word]
        is_group = hasattr(command, "commands") and not command.invoke_without_command
        if not is_group and "--json" not in {option for parameter in command.params for option in parameter.opts}:
            without.add(" ".join(words))
    assert without <= {"demo", "up", "daemon", "relay", "web"}


def test_an_answer_in_sentences_is_json_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, headway: Headway, fake_cluster: ModuleType
) -> None:
    """The arguments, and the sentences under `answer`; errors stay a line on stderr."""
    monkeypatch.chdir(tmp_path)
    code, out, _ = headway("certs", "ca", "node-a", "--operator", "me", "--json")
    told = json.loads(out)
    assert (code, told["names"]) == (0, ["node-a"])
    assert told["answer"][1:] == ["ca/node-a: for node node-a", "ca/me: for operator me"]
    code, out, err = headway("pause", "nothing", "--json")
    assert (code, out) == (2, "")
    assert err.startswith("headway: job nothing: no such job")


@pytest.mark.parametrize("words", [[], *command_names()], ids=" ".join)
@pytest.mark.parametrize("columns", [60, 80])
def test_help_is_neither_cut_nor_wider_than_the_terminal(
    words: list[str], columns: int, headway: Headway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it name a file that only a checkout has."""
    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, _ = headway(*words, "--help")
    usage, _, rest = out.partition("\n\n")
    assert [line for line in out.splitlines() if len(line) > columns] == []
    assert "..." not in rest
    assert usage.startswith("Usage: headway")
    assert not re.findall(r"\b(?:docs|tests|bench)/\S*", out)


def test_the_files_of_the_help_texts_make_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, headway: Headway
) -> None:
    """Whoever writes the job file of `run --help` and the nodes file of `plan --help` gets a plan from them."""
    monkeypatch.chdir(tmp_path)
    _, out, _ = headway("run", "--help")
    Path("job.toml").write_text(re.search(r'job\.name = ".*"', out)[0])  # type: ignore[index]
    _, out, _ = headway("plan", "--help")
    Path("nodes.toml").write_text(out.partition("nodes.toml:\n")[2].partition("\n\n")[0])
    code, out, err = headway("plan", "job.toml", "--nodes-file", "nodes.toml")
    assert (code, err.count("\n")) == (0, 1)
    assert "leaves some to the plan, which takes no time for elementwise work on cards without `model`" in err
    assert "berlin-1" in out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["run", "--nope", "x.toml"], "No such option"),
        (["run"], "Missing argument"),
        (["up", "--nodes", "0"], "--nodes"),
        (["run", "missing.toml", "--out", "x"], "missing.toml: no such job file"),
        (["reference", "missing.toml", "--out", "x"], "missing.toml: no such job file"),
        (["reference", str(ROOT / "docs/jobs/small.toml"), "--out", "/proc/x"], "/proc/x: cannot be written to"),
        (
            ["reference", str(ROOT / "docs/jobs/small.toml"), "--out", "x", "--coded-cuts", "block.1"],
            "--coded-cuts: this job's links round nothing, so cuts change no bit",
        ),
        (["certs", "/proc/x", "a"], "/proc/x: cannot be made"),
        (["certs", "x", "a", "--days", "99999999999"], "--days"),
        (["data", "prepare", str(ROOT / "README.md"), "--out", "/proc/x"], "/proc/x: cannot be written to"),
        (["submit", "missing.toml"], "missing.toml: no such job file"),
        (["plan", "missing.toml"], "missing.toml: no such job file"),
        (["status", "x", "--etcd", "localhost:1", "--certs", "/nonexistent"], "/nonexistent/ca.pem"),
    ],
)
def test_usage_errors_are_one_line_and_code_2(arguments: list[str], line: str, headway: Headway) -> None:
    """A wrong flag, file or folder gives one line on stderr, nothing on stdout, and code 2."""
    code, out, err = headway(*arguments)
    assert (code, out) == (2, "")
    assert line in err
    assert err.startswith("headway: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ('data.source = "nowhere"', "job.toml:data.source"),
        (f'data.sha256 = "{"0" * 64}"', "job.toml:data.sha256"),
        ("placement.mid_nodes = 2", "job.toml:placement.mid_nodes: unknown key; did you mean `min_nodes`?"),
        ('fault.checkpoint_dir = "/proc/self/stat/checkpoints"', "job.toml:fault.checkpoint_dir"),
    ],
)
def test_a_job_that_cannot_run_is_refused_before_a_cluster_starts(
    key: str, line: str, headway: Headway, tmp_path: Path
) -> None:
    """Data that is not here or not the job's, a misspelt key, a folder below a file."""
    (tmp_path / "job.toml").write_text(f'job.name = "x"\n{key}\n')
    code, out, err = headway("run", str(tmp_path / "job.toml"), "--out", str(tmp_path / "out"))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert line in err
    assert not (tmp_path / "out" / "state").exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["status", "nope"], "job nope: no such job; there are demo, broken"),
        (["jobs", "rm", "demo"], "job demo: is running; first `headway cancel demo`"),
        (["certs", "restore", "a"], "a: is not revoked"),
        (["certs", "revoke", "a/b"], "NAME: 'a/b' cannot be the name of a certificate: one has"),
    ],
)
def test_what_the_cluster_cannot_do_is_one_line(
    arguments: list[str], line: str, headway: Headway, fake_cluster: ModuleType
) -> None:
    """With what exists, or what to do first."""
    code, out, err = headway(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"headway: {line}")


@pytest.mark.parametrize("arguments", [[], ["data"], ["config"]], ids=" ".join)
def test_a_group_without_a_command_shows_its_help(arguments: list[str], headway: Headway) -> None:
    """Its commands stand on lines of their own; the code is that of a usage error."""
    code, out, err = headway(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("Usage: headway")
    assert ("\nCommands:\n" if arguments else "\nSet up:\n") in err


def test_no_cluster_is_one_line_and_code_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, headway: Headway) -> None:
    """In a folder without a cluster, readers say how to get one; also when `up` was killed and left its file."""
    monkeypatch.chdir(tmp_path)
    for name in ("HEADWAY_ETCD", "HEADWAY_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(30)
    for prepare in (False, True):
        if prepare:
            (tmp_path / ".headway").mkdir()
            content = {"pid": gone.pid, "etcd": ["127.0.0.1:1"], "certificates": "/x"}
            (tmp_path / ".headway" / "cluster.json").write_text(json.dumps(content))
        code, out, err = headway("jobs")
        assert (code, out) == (3, "")
        assert "start one with `headway up`" in err
        assert err.count("\n") == 1


def test_an_etcd_that_is_absent_is_one_line_and_code_3(headway: Headway) -> None:
    """Nobody listens at --etcd: one line that names it, code 3."""
    code, _, err = headway("nodes", "--etcd", "127.0.0.1:1")
    assert code == 3
    assert "127.0.0.1:1" in err
    assert err.count("\n") == 1


def test_jobs_as_json(headway: Headway, fake_cluster: ModuleType) -> None:
    """`jobs --json` is a list of reports in order of submission."""
    code, out, _ = headway("jobs", "--json")
    assert code == 0
    demo, broken = json.loads(out)
    assert (demo["name"], demo["phase"], demo["batch"], demo["batches"], demo["loss"]) == (
        "demo",
        "running",
        49,
        150,
        2.5,
    )
    assert demo["seconds_left"] == pytest.approx(100.0)
    assert (broken["name"], broken["phase"], broken["batch"], broken["exact"]) == ("broken", "failed", None, None)


def test_status_as_json(headway: Headway, fake_cluster: ModuleType) -> None:
    """`status --json` says who holds which layers, with the workers' states, and whether the job is exact."""
    code, out, _ = headway("status", "demo", "--json")
    assert code == 0
    report = json.loads(out)
    assert report["schema"] == 1
    assert [stage["node"] for stage in report["stages"]] == ["a", "b"]
    assert [stage["worker"] for stage in report["stages"]] == ["running", ""]
    assert [layer for stage in report["stages"] for layer in stage["layers"]] == report["layers"]
    assert (report["exact"], report["exact_reason"], report["plan_reason"]) == (True, "one class", "node b joined")


def test_status_for_people(headway: Headway, fake_cluster: ModuleType) -> None:
    """`status` draws stages, nodes and the leader; a failed job's traceback is printed whole."""
    code, out, _ = headway("status", "demo")
    assert code == 0
    for text in ("running", "generation 3", "batch 50/150", "stage 0 on a: embed, block.0-3", "leads", "exact: yes"):
        assert text in out
    code, out, _ = headway("status", "broken")
    assert fake_cluster.TRACEBACK.strip() in out


def test_nodes_and_events_as_json(headway: Headway, fake_cluster: ModuleType) -> None:
    """`nodes --json` and `events --json` are the records themselves."""
    _, out, _ = headway("nodes", "--json")
    assert [(found["name"], found["failures"]) for found in json.loads(out)] == [("a", []), ("b", [])]
    _, out, _ = headway("events", "demo", "--json")
    (event,) = json.loads(out)
    assert {name: event[name] for name in ("at", "text", "generation")} == {
        "at": 1.0,
        "text": "Node b joined.",
        "generation": 3,
    }


@pytest.mark.parametrize("command", [("jobs",), ("nodes",), ("status", "demo"), ("events", "demo", "--json")])
def test_a_full_etcd_is_told_beside_what_was_asked(
    headway: Headway, fake_cluster: ModuleType, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """On stderr, as no node can leave a record about it; what was asked is on stdout as ever."""
    answer = headway(*command)
    monkeypatch.setattr(fake_cluster.FakeSession, "full", "etcd is full")
    assert headway(*command) == (0, answer[1], f"{answer[2]}headway: etcd is full\n")


def test_events_end_with_what_ails_the_nodes_of_the_job(
    headway: Headway, fake_cluster: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another daemon shows node b's certificate: the person who asks why the job waits hears of it."""
    sound = fake_cluster.node
    ailing = {"identity": "another daemon, at c:1, has this node's certificate"}
    monkeypatch.setattr(fake_cluster, "node", lambda name: replace(sound(name), ailments=ailing if name == "b" else {}))
    code, out, err = headway("events", "demo")
    assert (code, err) == (0, f"headway: now node b: identity {ailing['identity']}\n")
    assert "Node b joined." in out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (JobFailedError("demo", "failed", "a worker failed", "ValueError: x", "run/failure.log"), 4),
        (ConflictError("job demo", "keeps changing"), 3),
        (TimeoutError("job demo: still running"), 3),
        (KeyboardInterrupt(), 130),
    ],
    ids=["failed", "conflict", "timeout", "interrupt"],
)
def test_errors_have_their_codes(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, headway: Headway, fake_cluster: ModuleType
) -> None:
    """Each kind of error ends in its exit code, with one line or, after Ctrl-C, none."""

    async def fail(_: object) -> None:
        raise error

    monkeypatch.setattr(fake_cluster.FakeSession, "view", fail)
    found, out, err = headway("jobs")
    assert (found, out) == (code, "")
    assert err.count("\n") == (0 if code == 130 else 1)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("watch demo", "headway: demo goes on without this command; `headway watch demo` shows it again\n"),
        ("logs demo -f", "headway: demo goes on without this command; `headway watch demo` shows it again\n"),
        ("history demo -f", "headway: demo goes on without this command; `headway watch demo` shows it again\n"),
        ("history demo", ""),
    ],
)
def test_who_stops_to_follow_a_job_reads_that_it_goes_on(
    line: str, told: str, monkeypatch: pytest.MonkeyPatch, headway: Headway, fake_cluster: ModuleType
) -> None:
    """Ctrl-C in each command that follows; one that only reads has nothing to say."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fake_cluster.FakeSession, "view", stop)
    monkeypatch.setattr(fake_cluster.FakeSession, "follow", stop, raising=False)
    monkeypatch.setattr(fake_cluster.FakeSession, "while_reachable", lambda _, work: work, raising=False)
    code, _, err = headway(*line.split())
    assert (code, err) == (130, told)


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """HEADWAY_DEBUG=1 lets an error through as it was raised."""
    monkeypatch.setenv("HEADWAY_DEBUG", "1")
    with pytest.raises(Exception, match="no such job file"):
        run(["run", "missing.toml", "--out", "x"])


def test_nothing_is_said_to_start_for_a_job_file_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, headway: Headway, tmp_path: Path
) -> None:
    """The file is read before a terminal shows `starting etcd`."""
    said: list[int] = []
    monkeypatch.setattr("headway.daemon.cli.local._say_starting", said.append)
    code, _, err = headway("run", "missing.toml", "--out", str(tmp_path / "x"))
    assert (code, said) == (2, [])
    assert "no such job file" in err


def test_certificates_for_a_cluster(tmp_path: Path, headway: Headway) -> None:
    """`certs` makes an authority, then adds to it; each name gets the three files that --certs wants."""
    authority = tmp_path / "ca"
    assert headway("certs", str(authority), "node-a=10.0.0.7,a.example")[0] == 0
    assert headway("certs", str(authority), "admin")[0] == 0
    for name in ("node-a", "admin"):
        assert {file.name for file in (authority / name).iterdir()} == {"ca.pem", "cert.pem", "key.pem"}
    assert (authority / "admin" / "ca.pem").read_bytes() == (authority / "ca.pem").read_bytes()


def test_known_certificates_are_listed(headway: Headway, fake_cluster: ModuleType) -> None:
    """`certs list` has the nodes, and `certs` knows its commands from a folder."""
    code, out, told = headway("certs", "list")
    assert code == 0
    assert told.startswith("not here: what `headway certs` made for etcd and people")
    assert out.splitlines()[0].split() == ["NAME", "ROLE", "HERE", "SINCE", "UNTIL", "REVOKED"]
    assert {line.split()[0] for line in out.splitlines()[1:]} == fake_cluster.cluster_view().nodes.keys()
    code, out, told = headway("certs", "list", "--json")
    assert '"is_present": true' in out
    assert not told


def test_an_invitation_says_which_options_a_machine_behind_a_router_needs(
    headway: Headway, fake_cluster: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On stderr, and for nodes alone: the line itself is all of stdout."""
    monkeypatch.setattr("headway.daemon.client.certificate_requests.invite", AsyncMock(return_value="hw1-x"))
    code, out, told = headway("invite", "b")
    assert (code, out) == (0, "headway join hw1-x\n")
    assert "--listen for another port than 7070, --announce HOST:PORT where a router" in told
    assert "--announce" not in headway("invite", "ann", "--role", "reader")[2]


def test_a_list_of_machines_becomes_a_private_file_of_commands(
    headway: Headway, fake_cluster: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A line each, with its options; who has a certificate is named, and the others have their commands."""

    async def invite(_: object, name: str, **__: object) -> str:
        if name == "c":
            raise ConfigError("c has a certificate: --again gives the name out again", "invite")
        if name == "z":
            raise StoreUnreachableError("etcd", "is away")
        return f"hw1-{name}"

    monkeypatch.setattr("headway.daemon.client.certificate_requests.invite", invite)
    hosts, out = tmp_path / "hosts.txt", tmp_path / "commands.txt"
    hosts.write_text("# the rack\na=10.0.0.7 --site berlin\n\nc\nd --relay auto  # at home\n")
    code, printed, told = headway("invite", "--from", str(hosts), "--out", str(out))
    assert (code, printed) == (2, "")
    assert out.read_text() == "a headway join hw1-a --site berlin\nd headway join hw1-d --relay auto\n"
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert f"{hosts}:4: invite: c has a certificate" in told
    assert "1 of 3 lines have no command" in told
    assert "is there already" in headway("invite", "--from", str(hosts), "--out", str(out))[2]
    hosts.write_text("e\nf\nz\ng\n")
    code, _, told = headway("invite", "--from", str(hosts), "--out", str(tmp_path / "half"))
    assert code
    assert (tmp_path / "half").read_text() == "e headway join hw1-e\nf headway join hw1-f\n", "no token is lost"
    assert "the list goes on after 2 commands" in told
    for line, why in (
        ("b\nb/c", ":2: 'b/c' cannot be a name"),
        ("b --sight x", ":1: '--sight' is not understood: after the name may stand --listen"),
        ("b --site", ":1: '--site' is not understood"),
        ("b\nB", ":2: B stands there already"),
        ("b 'c", ":1: cannot be read: No closing quotation"),
    ):
        hosts.write_text(line)
        code, _, told = headway("invite", "--from", str(hosts), "--out", str(tmp_path / "none"))
        assert code == 2
        assert f"{hosts}{why}" in told
        assert not (tmp_path / "none").exists()
    assert headway("invite", "b", "--from", str(hosts))[0] == headway("invite")[0] == 2


def test_certificates_of_an_authoritys_folder_are_listed_beside_the_clusters(
    headway: Headway, fake_cluster: ModuleType, tmp_path: Path
) -> None:
    """An operator whom `headway certs` has made is known to the folder alone; etcd gets a user for each known name."""
    assert headway("certs", str(tmp_path / "ca"), "etcd=10.0.0.5", "--operator", "me")[0] == 0
    _, out, told = headway("certs", "list", "--ca", str(tmp_path / "ca"))
    rows = {words[0]: words for words in map(str.split, out.splitlines()[1:])}
    assert (rows["me"][1], rows["me"][2]) == ("operator", "-")
    assert {"a", "b", "etcd"} < rows.keys()
    assert not told
    listed = json.loads(headway("certs", "list", "--ca", str(tmp_path / "ca"), "--json")[1])
    since = next(each["issued_at"] for each in listed if each["name"] == "me")
    assert abs(since - time.time()) < 600, "since it was made, not since it is valid"
    assert "--operator me --operator node-a" in headway("certs", "etcd-users")[2], "nobody could change anything"
    _, out, _ = headway("certs", "etcd-users", "--operator", "me")
    assert "etcdctl user add --no-password a\netcdctl user grant-role a headway-node" in out
    assert out.splitlines()[-1] == "etcdctl auth enable"
    assert headway("certs", "etcd-users", "a;b")[0] == 2


def test_the_second_step_of_a_rotation_says_what_people_make_again(tmp_path: Path, headway: Headway) -> None:
    """Nobody renews etcd's certificate, the first node's and those of people: the new authority makes them by hand."""
    authority = str(tmp_path / "ca")
    assert headway("certs", authority, "etcd=10.0.0.5", "--operator", "me")[0] == 0
    assert headway("certs", "rotate", authority)[0] == 0
    code, out, _ = headway("certs", "rotate", authority, "--sign")
    assert code == 0
    assert (
        "make again what `headway certs` has made, and copy it: of etcd, of nodes with the authority, of people" in out
    )


def test_config_show_takes_file_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, headway: Headway
) -> None:
    """`config show` prints what a daemon would run with: the environment over the file."""
    (tmp_path / "node.toml").write_text('name = "a"\nsite = "berlin"\n')
    monkeypatch.setenv("HEADWAY_SITE", "paris")
    code, out, _ = headway("config", "show", "--config", str(tmp_path / "node.toml"), "--json")
    assert code == 0
    settings = json.loads(out)
    assert (settings["name"], settings["site"]) == ("a", "paris")


def test_version(headway: Headway) -> None:
    """`--version` prints the installed one."""
    code, out, _ = headway("--version")
    assert code == 0
    assert out.count(".") == 2


def test_plan_with_little_memory_says_what_is_needed(headway: Headway, tmp_path: Path) -> None:
    """`plan --nodes 2 --memory` refuses a job that does not fit, in one line; with more memory it is placed."""
    (tmp_path / "job.toml").write_text('[job]\nname = "tiny"\n')
    code, _, err = headway("plan", str(tmp_path / "job.toml"), "--nodes", "2", "--memory", "0.01")
    assert (code, err.count("\n")) == (2, 1), err
    assert headway("plan", str(tmp_path / "job.toml"), "--nodes", "2", "--memory", "64")[0] == 0


@pytest.mark.parametrize(
    ("told", "meaning"),
    [
        ("Ssl handshake failed: error:1000007d:SSL routines:CERTIFICATE_VERIFY_FAILED: self signed", "not signed by"),
        ("Ssl handshake failed: SSLV3_ALERT_UNKNOWN_CA", "of another authority"),
        ("Ssl handshake failed: error:100000f7:SSL routines:OPENSSL_internal:WRONG_VERSION_NUMBER", "speaks no TLS"),
    ],
)
def test_a_failed_tls_handshake_becomes_one_sentence(
    told: str, meaning: str, monkeypatch: pytest.MonkeyPatch, headway: Headway, fake_cluster: ModuleType
) -> None:
    """The sentence begins with the node that was called."""

    async def fail(_: object) -> None:
        raise StoreUnreachableError("10.0.0.7:2379", told)

    monkeypatch.setattr(fake_cluster.FakeSession, "view", fail)
    code, _, err = headway("jobs")
    assert code == 3
    assert err.startswith("headway: 10.0.0.7:2379: ")
    assert meaning in err
    assert "SSL" not in err.replace("TLS", "")


def test_data_prepare_tells_of_doubtful_files(tmp_path: Path, headway: Headway) -> None:
    """An empty file gives a warning; a file that is no text ends it, unless bytes are asked for."""
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "a.txt").write_text("once upon a time " * 100)
    (tmp_path / "books" / "b.txt").write_bytes(b"")
    (tmp_path / "books" / "d.txt").write_text("ä" * 70_000)
    command = ("data", "prepare", str(tmp_path / "books"), "--out")
    code, _, err = headway(*command, str(tmp_path / "out"))
    assert (code, err) == (0, f"headway: {tmp_path / 'books' / 'b.txt'}: is empty\n")
    (tmp_path / "books" / "c.bin").write_bytes(b"PNG\x00\xff" * 10)
    code, _, err = headway(*command, str(tmp_path / "other"))
    assert code == 2
    assert "c.bin: is no UTF-8 text, but has a zero byte at 3; --binary takes every file as it is" in err
    assert headway(*command, str(tmp_path / "other"), "--binary")[0] == 0


def test_a_path_that_is_no_utf8_is_escaped(tmp_path: Path, headway: Headway) -> None:
    """In text and in JSON, in which it keeps its meaning."""
    (tmp_path / "in.txt").write_text("text")
    out = str(tmp_path / "out\udcff")
    code, said, _ = headway("data", "prepare", str(tmp_path / "in.txt"), "--out", out, "--json")
    assert (code, json.loads(said)["out"]) == (0, out)


@pytest.mark.parametrize("options", [(), ("--pack", "512")])
def test_texts_that_make_few_batches_are_told_of(headway: Headway, tmp_path: Path, options: tuple[str, ...]) -> None:
    """As a stream too, by the sequences of a job that says nothing."""
    (tmp_path / "in.txt").write_text("a short text " * 500)
    code, _, err = headway("data", "prepare", str(tmp_path / "in.txt"), *options, "--out", str(tmp_path / "out"))
    rows = "50 rows of 128 tokens: 2 batches" if not options else "13 rows of 512 tokens: 1 batch"
    assert (code, rows in err) == (0, True), err


def test_a_plan_without_a_cluster_is_for_this_machine(
    headway: Headway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line says so. A cluster that is named is asked."""
    monkeypatch.chdir(tmp_path)
    for name in ("HEADWAY_ETCD", "HEADWAY_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "job.toml").write_text('[job]\nname = "x"\n')
    code, out, err = headway("plan", "job.toml")
    assert code == 0
    assert "this-machine" in out
    assert "so the plan is for this machine alone; --nodes N plans for more" in err
    code, _, err = headway("plan", "job.toml", "--cluster", "nowhere")
    assert code == 3
    assert "nowhere: no cluster runs here" in err


def test_a_shell_completes_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What the completion that `--install-completion` installs asks: commands that begin so."""
    monkeypatch.setenv("_HEADWAY_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "headway sta")
    monkeypatch.setenv("COMP_CWORD", "1")
    with pytest.raises(SystemExit) as ended:
        run([])
    assert (ended.value.code, capsys.readouterr().out.split()) == (0, ["status"])


async def test_a_job_that_is_over_names_the_way_to_continue() -> None:
    """`resume` of a cancelled job: only its checkpoint is left, and a new job may begin with it."""
    view = cluster_view()
    over = encode(PhaseRecord(phase=Phase.CANCELLED))
    view.apply(Keys.of("broken", "phase"), over, mod_revision=99, create_revision=99)
    session: Any = SimpleNamespace(view=AsyncMock(return_value=view))
    with pytest.raises(ConfigError) as error:
        await resume(session, "broken")
    assert str(error.value) == (
        "job broken: is cancelled already; `headway jobs rm broken` and `headway submit --from CHECKPOINT` make a new "
        "job of its checkpoint"
    )


def test_an_interrupted_demo_promises_no_continuation(headway: Headway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each demo starts from the beginning, so Ctrl-C does not speak of saved jobs."""
    monkeypatch.setattr(
        interrupts, "run_interruptible", lambda _main, *, on_first: sys.stderr.write(on_first) * 0 or 130
    )
    code, _, err = headway("demo")
    assert (code, err) == (130, "stopping; the next demo starts from the beginning (Ctrl-C again stops at once)")
