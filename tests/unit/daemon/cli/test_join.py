"""What `headway join` prints: commands that work as they stand, in any folder, and the same ones each time."""

import re
import shlex
from pathlib import Path

import msgspec
import pytest

from headway.daemon.cli.program import run
from headway.daemon.install import machine
from headway.daemon.joining.join_client import Joined
from headway.daemon.joining.join_messages import JoinAnswer
from headway.daemon.joining.join_token import JoinToken, write_token
from headway.daemon.rpc.certificates import CertificateAuthority
from headway.stages.sockets.tls_identity import TlsIdentity

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
    monkeypatch.setattr("headway.daemon.joining.join_client.join", lambda *_: Joined(answer, "10.0.0.9"))
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
    monkeypatch.setattr("headway.daemon.joining.join_client.join", lambda *_: person)
    assert run(["join", LINE, "--dir", "my own"]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert words == ["export", "HEADWAY_ETCD=10.0.0.5:2379", f"HEADWAY_CERTS={tmp_path}/my own"]
