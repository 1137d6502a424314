"""`status` asks, while etcd is away, the daemons that were seen when it was there."""

import json
import re
import shlex
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import msgspec
import pytest

from headway.daemon.base.addresses import NodeEndpoint
from headway.daemon.base.errors import ConfigError, StoreUnreachableError
from headway.daemon.cli import install as machine
from headway.daemon.cli.program import run
from headway.daemon.client import cluster_access, job_requests
from headway.daemon.client.cluster_access import ClusterSession, known, remember
from headway.daemon.client.job_requests import DaemonStatus
from headway.daemon.client.job_watch import JournalCopy, history_in, read_history, wait_for_phase
from headway.daemon.cluster.format import encode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.records import Desired, DesiredRecord, Phase, PhaseRecord
from headway.daemon.decide.cluster_view import ClusterView
from headway.daemon.net.certificates import CertificateAuthority
from headway.daemon.net.join_client import Joined
from headway.daemon.net.join_token import JoinAnswer, JoinToken, write_token
from headway.daemon.node.service import status_reply
from headway.daemon.reports.metrics_file import rates
from headway.proto.control_pb2 import JournalRows
from headway.stages.early_stop import NOT_KNOWN
from headway.stages.errors import UnavailableError
from headway.stages.sockets.tls_identity import TlsIdentity
from tests.rigs.fake_cluster import cluster_view, node

ETCD = ("10.0.0.5:2379", "10.0.0.6:2379")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_CACHE_DIR", str(tmp_path / "cache"))


def test_known_daemons_are_found_by_etcd_members_in_any_order() -> None:
    """Each cluster has its own entry, and later observations replace earlier ones."""
    assert known(ETCD) == ()
    remember(ETCD, [node("a"), node("b")])
    assert known(ETCD[::-1]) == (NodeEndpoint("a", "a:4711"), NodeEndpoint("b", "b:4711"))
    assert known(("other:2379",)) == ()
    remember(ETCD, [replace(node("a"), address="a:1")])
    assert known(ETCD) == (NodeEndpoint("a", "a:1"),)
    remember(ETCD, [])
    assert known(ETCD) == (NodeEndpoint("a", "a:1"),), "an empty etcd says nothing of the daemons"


@pytest.mark.parametrize("content", [b"{", b"[1]", b'[{"name": "../x", "address": "a:1"}]', b"[" * 100_000])
def test_an_unreadable_cache_file_is_ignored(content: bytes) -> None:
    """A torn, foreign or deeply nested file gives no daemons."""
    remember(ETCD, [node("a")])
    cluster_access._path(ETCD).write_bytes(content)
    assert known(ETCD) == ()


def test_an_unwritable_cache_is_ignored(tmp_path: Path) -> None:
    """A file stands where the folder would be."""
    (tmp_path / "cache").write_text("")
    remember(ETCD, [node("a")])
    assert known(ETCD) == ()


def test_status_asks_them_while_etcd_is_away(
    fake_cluster: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`status --etcd …` without an answer from etcd: the daemons that were seen there, and their words."""
    asked: list[Any] = []

    async def view(_self: object) -> object:
        raise StoreUnreachableError("etcd", "no answer")

    async def ask(addresses: Any, _identity: object) -> job_requests.DaemonStatus:
        asked.extend(addresses)
        return job_requests.DaemonStatus(node="a", etcd_reachable=False, etcd_away_s=7.0, waits_for="nothing", jobs={})

    address = cluster_access.ClusterAddress(etcd=ETCD)
    monkeypatch.setattr(cluster_access, "find_cluster", lambda **_: address)
    monkeypatch.setattr(fake_cluster.FakeSession, "view", view)
    monkeypatch.setattr(job_requests, "ask_daemons", ask)
    assert run(["status"]) == 3, "nobody is known yet"
    remember(ETCD, [node("a")])
    capsys.readouterr()
    assert run(["status"]) == 0
    assert asked == [NodeEndpoint("a", "a:4711")]
    assert "etcd has been away for 7 s, says node a" in capsys.readouterr().out


class FollowedSession:
    """Shows one view after another."""

    def __init__(self, *views: ClusterView) -> None:
        self._views = views

    async def follow(self) -> AsyncGenerator[ClusterView, None]:
        """All views, and no more."""
        for view in self._views:
            yield view


def broken(phase: PhaseRecord, desired: DesiredRecord) -> ClusterView:
    """The cluster's failed job, a little later."""
    view = cluster_view()
    for leaf, record in (("phase", phase), ("desired", desired)):
        view.apply(Keys.of("broken", leaf), encode(record), mod_revision=1000, create_revision=1000)
    return view


async def test_watching_a_resumed_job_ignores_its_old_failure() -> None:
    """`resume` is written, and no leader has answered it yet."""
    failed, resumed = PhaseRecord(phase=Phase.FAILED, request=1), DesiredRecord(state=Desired.RUNNING, request=2)
    finished = PhaseRecord(phase=Phase.FINISHED, request=2)
    session: Any = FollowedSession(broken(failed, resumed), broken(finished, resumed))
    job = await wait_for_phase(session, "broken", frozenset({Phase.FINISHED}), timeout_s=5)
    assert job.phase.phase is Phase.FINISHED
    again = PhaseRecord(phase=Phase.FAILED, request=2)
    session = FollowedSession(broken(failed, resumed), broken(again, resumed))
    job = await wait_for_phase(session, "broken", frozenset({Phase.FINISHED}), timeout_s=5)
    assert job.phase == again


class Session:
    """Always sees the same cluster."""

    identity = TlsIdentity(ca=b"", certificate=b"", key=b"")

    async def view(self) -> ClusterView:
        return cluster_view()


class Daemons:
    """Answers of each node, call after call; the last answer stays. -1: no answer."""

    def __init__(self, **known: list[int]) -> None:
        self._known = known

    async def journal(
        self, endpoint: NodeEndpoint, job: str, *, from_batch: int, every: int
    ) -> AsyncIterator[JournalRows]:
        """Rows below what the daemon knows of."""
        assert job == "demo"
        answers = self._known[endpoint.address[0]]
        below = answers.pop(0) if len(answers) > 1 else answers[0]
        if below < 0:
            raise UnavailableError(str(endpoint), "refused")
        batches = [batch for batch in range(from_batch, below) if batch % every == 0]
        n = len(batches)
        yield JournalRows(
            batch=batches,
            loss=[1.0] * n,
            tokens=[1] * n,
            seconds=[0.1] * n,
            generation=[1] * n,
            eval_loss=[NOT_KNOWN] * n,
            gradient_norm=[-1.0] * n,
            final_eval_loss=[NOT_KNOWN] * n,
            next_batch=max(from_batch, below),
        )

    async def close(self) -> None:
        """Nothing is open."""


async def copied(tmp_path: Path, num_batches: int, *, timeout_s: float = 5.0, **known: list[int]) -> list[int]:
    """The batches in the file."""
    copy = JournalCopy(cast(ClusterSession, Session()), "demo", tmp_path / "metrics.jsonl")
    copy.reader._client = cast(Any, Daemons(**known))
    try:
        await copy.copy_whole(num_batches, timeout_s=timeout_s)
    finally:
        await copy.close()
    return [json.loads(line)["batch"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


async def test_the_past_of_a_job_is_what_any_daemon_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first does not answer, the second has 24 batches; their rates are those of the job's schedule."""

    monkeypatch.setattr("headway.daemon.client.job_watch.NodeClient", lambda _: Daemons(a=[-1], b=[24]))
    told = [row async for row in read_history(cast(ClusterSession, Session()), "demo", from_batch=20)]
    spec = cluster_view().jobs["demo"].spec
    assert spec is not None
    assert [(row.batch, row.learning_rate) for row in told] == [(b, rates(spec)(b)) for b in range(20, 24)]


@pytest.mark.parametrize(
    ("phase", "every", "told"),
    [
        (Phase.FINISHED, 10, [10, 20, 23]),
        (Phase.FINISHED, 23, [23]),
        (Phase.FAILED, 10, [10, 20, 23]),
        (Phase.RUNNING, 10, [10, 20]),
    ],
)
async def test_the_last_row_of_a_job_that_is_over_is_always_shown(
    phase: Phase, every: int, told: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, also if `every` divides it. While the job trains, its newest row is one among others."""
    monkeypatch.setattr("headway.daemon.client.job_watch.NodeClient", lambda _: Daemons(a=[24]))
    view = cluster_view()
    view.jobs["demo"].phase = PhaseRecord(phase=phase)
    rows = history_in(cast(ClusterSession, Session()), view, "demo", from_batch=5, every=every)
    assert [row.batch async for row in rows] == told


async def test_a_daemon_that_lags_does_not_end_the_copy(tmp_path: Path) -> None:
    """The first daemon knows an older boundary only; the second gives the rest."""
    assert await copied(tmp_path, 24, a=[20], b=[24]) == list(range(24))


async def test_all_daemons_lag_and_are_asked_again(tmp_path: Path) -> None:
    """Nobody knows of the end at first, one does not answer at all."""
    assert await copied(tmp_path, 24, a=[20, 20, 24], b=[-1]) == list(range(24))


async def test_a_journal_that_never_comes_is_named(tmp_path: Path) -> None:
    """The deadline ends the wait, and says how far it came and what the last daemon said."""
    with pytest.raises(TimeoutError, match=r"20 of 24 batches came within 0.3 s .*refused"):
        await copied(tmp_path, 24, timeout_s=0.3, a=[20], b=[-1])


def test_reports_survive_the_way_over_the_wire() -> None:
    """The report of the running job is what `status` shows from etcd; a job that nobody knows is named."""
    status = DaemonStatus.of(status_reply(cluster_view(), node="a", away_s=None))
    report = status.report("demo")
    assert (report.phase, report.batch, [stage.node for stage in report.stages]) == ("running", 49, ["a", "b"])
    assert status.line == "node a reaches etcd"
    with pytest.raises(ConfigError, match="node a knows demo, broken"):
        status.report("nope")
    assert list(DaemonStatus.of(status_reply(cluster_view(), node="a", away_s=None, job="demo")).jobs) == ["demo"]


def test_status_says_what_waits_for_etcd() -> None:
    """It names a recovering job, and says that training continues."""
    view = cluster_view()
    view.apply(
        Keys.of("demo", "phase"), encode(PhaseRecord(phase=Phase.RECOVERING)), mod_revision=1000, create_revision=1
    )
    line = DaemonStatus.of(status_reply(view, node="a", away_s=75.0)).line
    assert line.startswith("etcd has been away for 1:15, says node a; training continues; these wait for etcd: ")
    assert "demo: its recovery" in line


def test_days_of_an_authority_that_exists_are_refused(tmp_path: Any, headway: Any) -> None:
    """`certs --days` counts for a new authority only; it is not silently ignored later."""
    assert headway("certs", str(tmp_path / "ca"), "a", "--days", "10")[0] == 0
    code, _, err = headway("certs", str(tmp_path / "ca"), "b", "--days", "20")
    assert code == 2
    assert "leave --days out" in err
    assert headway("certs", str(tmp_path / "ca"), "b")[0] == 0


LINE = write_token(JoinToken("n", ("10.0.0.7:7070/join",), bytes(32), b"s" * 24))


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JoinAnswer:
    """The authority's answer to a node's request, in a folder where users may write."""
    identity = TlsIdentity.read(CertificateAuthority.create(tmp_path / "ca").issue("n"))
    answer = JoinAnswer(
        authority=identity.ca.decode(), certificate=identity.certificate.decode(), role="node", etcd=("10.0.0.5:2379",)
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine, "BOOTED", tmp_path)
    monkeypatch.setattr("headway.daemon.net.join_client.join", lambda *_: Joined(answer, "10.0.0.9"))
    return answer


def command(out: str, what: str) -> list[str]:
    """The words of a printed command, as a shell reads them."""
    found = re.search(rf"^{what}: *(.*)$", out, re.MULTILINE)
    assert found, out
    return shlex.split(found[1])


def test_each_command_is_one_that_a_shell_takes(answer: JoinAnswer, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder has spaces in its name: the daemon at once, as a service, and as a relay, at the port named."""
    assert run(["join", LINE, "--dir", "node b two", "--listen", "0.0.0.0:7171"]) == 0
    out = capsys.readouterr().out
    identity = ["--config", "node b two/daemon.toml", "--certs", "node b two"]
    assert command(out, "at once") == ["headway", "daemon", *identity, "--state-dir", "node b two/state"]
    assert shlex.join(identity) in out.split("as a service:")[1]
    relay = ["headway", "relay", "--certs", "node b two", "--etcd", "10.0.0.5:2379", "--listen", "0.0.0.0:7171"]
    assert command(out, "as a relay") == relay


def test_the_line_run_again_tells_the_same_start(answer: JoinAnswer, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the folders of certificate and state, the daemon would look for the service's."""
    assert run(["join", LINE]) == 0
    first = command(capsys.readouterr().out, "at once")
    assert run(["join", LINE]) == 2
    assert f"start it with `{shlex.join(first)}`" in capsys.readouterr().err


def test_a_persons_shell_takes_the_export(
    answer: JoinAnswer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One assignment each, although the folder has a space in its name."""
    person = Joined(msgspec.structs.replace(answer, role="reader"), "10.0.0.9")
    monkeypatch.setattr("headway.daemon.net.join_client.join", lambda *_: person)
    assert run(["join", LINE, "--dir", "my own"]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words == ["export", "HEADWAY_ETCD=10.0.0.5:2379", f"HEADWAY_CERTS={tmp_path}/my own"]
