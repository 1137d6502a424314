"""The shell of `headway install`: files that exist, and refusals in one line."""

import grp
import os
import sys
import sysconfig
from pathlib import Path

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.cli import install_machine as machine
from headway.daemon.cli.install_actions import Delete, DeleteIfEmpty, Facts, Run, Write
from headway.daemon.cli.program import run
from tests.rigs.mortal_work import dies_at


def test_a_machine_without_systemd_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One line that names systemd; another one that names root."""
    monkeypatch.setattr(machine, "BOOTED", tmp_path / "absent")
    with pytest.raises(ConfigError, match="systemd does not run this machine"):
        machine.check_machine()
    monkeypatch.setattr(machine, "BOOTED", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="only root"):
        machine.check_machine()


def test_a_dry_run_prints_the_actions_and_does_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither root nor systemd is needed, and no file appears."""
    monkeypatch.setattr(machine, "LOOKED_AT", ())
    monkeypatch.setattr(machine, "out_of_sight", lambda _: [])
    monkeypatch.setattr(machine, "_asks", lambda *_, **__: False)
    monkeypatch.setattr(machine, "act", pytest.fail)
    settings = tmp_path / "mine.toml"
    settings.write_text('etcd = ["e:2379"]\n')
    assert run(["install", "--config", str(settings), "--cuda", "no", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "write /etc/systemd/system/headway.service (mode 0644, group root)" in lines
    assert lines[-1] == "run systemctl start headway"


def test_a_program_in_a_home_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service could not see it: the error says where it belongs."""
    monkeypatch.setattr(sys, "prefix", "/home/me/venv")
    with pytest.raises(ConfigError, match="/opt/headway"):
        machine.read_wish(config=None, certificates=None, writable=[], cards="no", starts=True)


def test_broken_settings_are_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No TOML, absent certificates, and a relative folder: each names what is wrong."""
    monkeypatch.setattr(machine, "out_of_sight", lambda _: [])
    (tmp_path / "bad.toml").write_text("etcd = [")
    for wish, said in (
        ({"config": tmp_path / "bad.toml"}, "is not TOML"),
        ({"certificates": tmp_path}, "ca.pem: cannot be read"),
        ({"writable": [Path("checkpoints")]}, "absolute"),
    ):
        told = {"config": None, "certificates": None, "writable": [], "cards": "no", "starts": True, **wish}
        with pytest.raises(ConfigError, match=said):
            machine.read_wish(**told)  # type: ignore[arg-type]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a file to another group")
def test_files_are_written_whole_and_deleted(tmp_path: Path) -> None:
    """A file has its mode from the beginning; deleting twice is fine; a full folder stays."""
    path = tmp_path / "new" / "key.pem"
    machine.act(Write(str(path), b"secret", 0o600))
    assert (path.read_bytes(), path.stat().st_mode & 0o777, len(list(path.parent.iterdir()))) == (b"secret", 0o600, 1)
    machine.act(DeleteIfEmpty(str(path.parent)))
    for _ in range(2):
        machine.act(Delete(str(path)))
    machine.act(DeleteIfEmpty(str(path.parent)))
    assert not path.parent.exists()


def test_a_write_that_was_killed_leaves_the_old_file_and_no_draft_for_ever(tmp_path: Path) -> None:
    """At each of its steps: the file is the old one or the new one, and the next call leaves nothing else there."""
    path, group = tmp_path / "key.pem", grp.getgrgid(os.getgid()).gr_name
    write, number = Write(str(path), b"new" * 9999, 0o640, group), 0
    path.write_bytes(b"old")
    while dies_at(number, lambda: machine.act(write)):
        assert path.read_bytes() in (b"old", write.content)
        machine.act(write)
        assert (path.read_bytes(), list(tmp_path.iterdir())) == (write.content, [path])
        path.write_bytes(b"old")
        number += 1
    assert number > 3


def test_a_command_that_fails_is_one_line() -> None:
    """The command and its first line."""
    with pytest.raises(ConfigError, match=r"sh -c .*: no such unit$"):
        machine.act(Run(("sh", "-c", "echo no such unit >&2; exit 5")))


def test_a_missing_file_is_told_before_all_else(capsys: pytest.CaptureFixture[str]) -> None:
    """Who misspells a name hears it, and not first that root is needed."""
    for flag in ("--config", "--certs"):
        assert run(["install", flag, "nope"]) == 2
        assert "'nope' does not exist" in capsys.readouterr().err


def test_an_uninstall_of_nothing_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In place is nothing, here."""
    monkeypatch.setattr(machine, "look", Facts)
    assert run(["uninstall", "--dry-run"]) == 0
    assert capsys.readouterr().out == "nothing to do: no service is installed here\n"


def test_a_service_is_advised_where_it_can_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With systemd, and a program that the unit sees: else the advice begins with the installation."""
    monkeypatch.setattr(machine, "BOOTED", tmp_path)
    monkeypatch.setattr(machine, "out_of_sight", lambda _: [])
    program = Path(sysconfig.get_path("scripts")) / "headway"
    assert machine.service_command("--certs n") == f"sudo {program} install --certs n"
    monkeypatch.setattr(machine, "out_of_sight", lambda _: ["/home/me/venv"])
    told = machine.service_command("--certs n")
    assert told.startswith("/home/me/venv: the service sees no home folders and no /tmp: install it in /opt/headway,")
    assert told.endswith("then `sudo /opt/headway/bin/headway install --certs n`")
    monkeypatch.setattr(machine, "BOOTED", tmp_path / "absent")
    assert machine.service_command("--certs n") == ""
