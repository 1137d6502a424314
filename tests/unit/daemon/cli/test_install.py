"""`headway install` and `uninstall`: lists of actions, files that exist, and refusals in one line."""

import grp
import os
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.cli import install as machine
from headway.daemon.cli.install import (
    CERTIFICATES,
    CUDA,
    DROP_INS,
    ENVIRONMENT,
    FOLDER,
    HERE,
    SETTINGS,
    STATE,
    TMPFILES,
    UNIT,
    Action,
    Facts,
    Run,
    Wish,
    Write,
    install_actions,
    is_example,
    needs_restart,
    out_of_sight,
    read_shipped,
    uninstall_actions,
)
from headway.daemon.cli.program import run
from tests.rigs.mortal_work import dies_at

SHIPPED = read_shipped()
PLAIN = Wish(program_folder="/opt/headway/bin")
SETTLED = replace(PLAIN, settings=b'etcd = ["etcd:2379"]\n')
START = Run(("systemctl", "start", "headway"))


def after(facts: Facts, actions: tuple[Action, ...]) -> Facts:
    """The machine after an installation; as a real one, it refuses a folder's file before the folder and its group."""
    files, has_user, has_folder = dict(facts.files), facts.has_user, facts.has_folder
    for action in actions:
        if isinstance(action, Write):
            assert action.group == "root" or has_user
            assert has_folder or not action.path.startswith(FOLDER)
            files[action.path] = action.content
        elif action.command[0] == "rm":
            files = {path: content for path, content in files.items() if path not in action.command}
        has_user |= isinstance(action, Run) and action.command[0] == "systemd-sysusers"
        has_folder |= isinstance(action, Run) and action.command[0] == "systemd-tmpfiles"
    is_running = facts.is_running or START in actions
    return Facts(files=files, has_user=has_user, has_folder=has_folder, is_enabled=True, is_running=is_running)


def test_a_bare_machine_gets_everything_in_an_order_that_works() -> None:
    """User and folders come before the files that belong to them, and systemd reads the unit before it starts it."""
    wish = replace(SETTLED, certificates={"key.pem": b"secret"})
    actions = install_actions(SHIPPED, wish, Facts())
    done = after(Facts(), actions)
    assert done.files[UNIT] == SHIPPED["headway.service"]
    assert done.files[SETTINGS] == SETTLED.settings
    assert [str(action) for action in actions[-3:]] == [
        "run systemctl daemon-reload",
        "run systemctl enable headway",
        "run systemctl start headway",
    ]
    modes = {action.path: action.mode for action in actions if isinstance(action, Write)}
    assert modes[f"{CERTIFICATES}/key.pem"] == modes[SETTINGS] == 0o640, "for root and the unit's group"
    assert modes[ENVIRONMENT] == 0o600


@pytest.mark.parametrize("wish", [SETTLED, replace(SETTLED, has_card=True, writable=("/mnt/data",))])
def test_a_second_call_does_nothing_and_completes_what_broke_off(wish: Wish) -> None:
    """With the same wish, and with none: what the first call was told is kept."""
    done = after(Facts(), install_actions(SHIPPED, wish, Facts()))
    assert install_actions(SHIPPED, wish, done) == ()
    assert install_actions(SHIPPED, replace(PLAIN, has_card=wish.has_card), done) == ()
    for broken in (
        *(replace(done, files={path: done.files[path] for path in done.files if path != gone}) for gone in done.files),
        replace(done, is_running=False),
        replace(done, needs_reload=True),
    ):
        assert after(broken, install_actions(SHIPPED, wish, broken)) == done


def test_the_examples_settings_are_not_started() -> None:
    """Their etcd does not exist: the user edits them first. The next call starts what was edited, and keeps it."""
    actions = install_actions(SHIPPED, PLAIN, Facts())
    assert START not in actions
    done = after(Facts(), actions)
    assert is_example(SHIPPED, PLAIN, done)
    assert install_actions(SHIPPED, PLAIN, done) == ()
    edited = replace(done, files={**done.files, SETTINGS: b'etcd = ["mine:2379"]\n'})
    actions = install_actions(SHIPPED, PLAIN, edited)
    assert START in actions
    assert not any(isinstance(action, Write) for action in actions)


def test_what_differs_on_this_machine_is_a_drop_in() -> None:
    """A program elsewhere, and folders outside of the unit's own. Without a card its drop-in goes."""
    settings = b'etcd = ["e:1"]\nstate_dir = "/var/lib/headway"\ncache_dir = "/mnt/100%"\nstore_dir = "/dev/shm/x"\n'
    wish = Wish(program_folder="/srv/hw/bin", settings=settings, writable=("/mnt/checkpoints",), has_card=True)
    done = after(Facts(), install_actions(SHIPPED, wish, Facts()))
    assert done.files[HERE].decode().splitlines()[1:] == [
        "[Service]",
        'Environment="PATH=/srv/hw/bin:/usr/local/bin:/usr/bin:/bin"',
        'ReadWritePaths="-/mnt/100%%"',
        'ReadWritePaths="-/mnt/checkpoints"',
    ]
    without = install_actions(SHIPPED, replace(wish, has_card=False), done)
    assert Run(("rm", "-f", CUDA)) in without
    assert needs_restart(without, done)


def test_uninstall_keeps_settings_and_state() -> None:
    """The service leaves cleanly before its files go, systemd forgets the unit, and purge leaves nothing."""
    installed = after(Facts(), install_actions(SHIPPED, replace(SETTLED, has_card=True), Facts()))
    actions = uninstall_actions(installed, purge=False)
    assert actions[0] == Run(("systemctl", "stop", "headway"))
    assert actions[-1] == Run(("systemctl", "daemon-reload"))
    left = after(installed, actions)
    assert {*left.files} == {SETTINGS, ENVIRONMENT}
    gone = Run(("rm", "-rf", FOLDER, STATE, DROP_INS)), Run(("userdel", "headway"))
    assert uninstall_actions(left, purge=False) == ()
    assert uninstall_actions(left, purge=True) == gone
    assert uninstall_actions(Facts(), purge=True) == ()
    assert uninstall_actions(Facts(needs_reload=True), purge=False) == actions[-1:]


def test_the_shipped_files_are_what_the_plan_expects() -> None:
    """The unit's program and state folder, and the tmpfiles' folders, are those that the actions name."""
    unit = SHIPPED["headway.service"].decode()
    assert "Environment=PATH=/opt/headway/bin:" in unit
    assert f"--config {SETTINGS}\n" in unit
    assert f"WorkingDirectory={STATE}\n" in unit
    assert f"EnvironmentFile=-{ENVIRONMENT}\n" in unit
    assert f"d {CERTIFICATES} " in SHIPPED["headway.tmpfiles"].decode()
    assert TMPFILES in SHIPPED["headway.tmpfiles"].decode()


def test_home_folders_are_out_of_sight() -> None:
    """A folder that only begins with the same letters is not one."""
    assert out_of_sight(["/home/me/venv/bin", "/homes/x", "/opt/headway", "/root"]) == ["/home/me/venv/bin", "/root"]


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


def test_a_write_that_was_killed_leaves_the_old_file_and_no_draft_for_ever(tmp_path: Path) -> None:
    """At each of its steps: the file is the old one or the new one, and the next call leaves nothing else there."""
    path, group = tmp_path / "key.pem", grp.getgrgid(os.getgid()).gr_name
    write, number = Write(str(path), b"new" * 9999, 0o640, group), 0
    path.write_bytes(b"old")
    while dies_at(number, lambda: machine.act(write)):
        assert path.read_bytes() in (b"old", write.content)
        machine.act(write)
        assert (path.read_bytes(), list(tmp_path.iterdir())) == (write.content, [path])
        assert path.stat().st_mode & 0o777 == 0o640
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
