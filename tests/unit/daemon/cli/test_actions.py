"""`headway install` and `uninstall` as lists of actions, and a machine that carries them out in memory."""

from dataclasses import replace

import pytest

from headway.daemon.cli.install_actions import (
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
    Delete,
    DeleteIfEmpty,
    Facts,
    Run,
    Wish,
    Write,
    install_actions,
    is_example,
    needs_restart,
    out_of_sight,
    uninstall_actions,
)
from headway.daemon.cli.install_machine import read_shipped

SHIPPED = read_shipped()
PLAIN = Wish(program_folder="/opt/headway/bin")
RELOAD = Run(("systemctl", "daemon-reload"))
SETTLED = replace(PLAIN, settings=b'etcd = ["etcd:2379"]\n')


def after(facts: Facts, actions: tuple[Action, ...]) -> Facts:
    """The machine after these actions; as a real one, it refuses a folder's file before the folder and its group."""
    files, folders = dict(facts.files), {*facts.folders}
    has_user, is_enabled, is_running = facts.has_user, facts.is_enabled, facts.is_running
    for action in actions:
        match action:
            case Write(path, content, _, group):
                assert group == "root" or has_user
                assert FOLDER in folders or not path.startswith(FOLDER)
                files[path] = content
                folders |= {DROP_INS} if path.startswith(DROP_INS) else set()
            case Delete(path):
                files = {name: content for name, content in files.items() if not f"{name}/".startswith(f"{path}/")}
                folders.discard(path)
            case DeleteIfEmpty(path):
                if not any(name.startswith(path) for name in files):
                    folders.discard(path)
            case Run(command):
                match command[0], command[1]:
                    case "systemd-sysusers", _:
                        has_user = True
                    case "systemd-tmpfiles", _:
                        folders.add(FOLDER)
                    case "userdel", _:
                        has_user = False
                    case "systemctl", "enable" | "disable":
                        is_enabled = command[1] == "enable"
                    case "systemctl", "start" | "stop":
                        is_running = command[1] == "start"
                        folders |= {STATE} if is_running else set()
    return Facts(files=files, folders=folders, has_user=has_user, is_enabled=is_enabled, is_running=is_running)


def test_a_bare_machine_gets_everything_in_an_order_that_works() -> None:
    """User and folders come before the files that belong to them, and systemd reads the unit before it starts it."""
    actions = install_actions(SHIPPED, SETTLED, Facts())
    done = after(Facts(), actions)
    assert done.files[UNIT] == SHIPPED["headway.service"]
    assert done.files[SETTINGS] == SETTLED.settings
    assert [str(action) for action in actions[-3:]] == [
        "run systemctl daemon-reload",
        "run systemctl enable headway",
        "run systemctl start headway",
    ]


@pytest.mark.parametrize("wish", [SETTLED, replace(SETTLED, has_card=True, writable=("/mnt/data",))])
def test_a_second_call_does_nothing(wish: Wish) -> None:
    """With the same wish, and with none: what the first call was told is kept."""
    done = after(Facts(), install_actions(SHIPPED, wish, Facts()))
    assert install_actions(SHIPPED, wish, done) == ()
    assert install_actions(SHIPPED, replace(PLAIN, has_card=wish.has_card), done) == ()


def test_the_examples_settings_are_not_started() -> None:
    """Their etcd does not exist: the user edits them first. The next call starts what was edited, and keeps it."""
    actions = install_actions(SHIPPED, PLAIN, Facts())
    assert Run(("systemctl", "start", "headway")) not in actions
    done = after(Facts(), actions)
    assert is_example(SHIPPED, PLAIN, done)
    edited = replace(done, files={**done.files, SETTINGS: b'etcd = ["mine:2379"]\n'})
    assert install_actions(SHIPPED, PLAIN, edited) == (Run(("systemctl", "start", "headway")),)


def test_an_installation_that_broke_off_is_completed() -> None:
    """After each action of the first call, a second call brings the machine to the same end."""
    wish = replace(SETTLED, has_card=True, certificates={"ca.pem": b"1", "cert.pem": b"2", "key.pem": b"3"})
    actions = install_actions(SHIPPED, wish, Facts())
    whole = after(Facts(), actions)
    for number in range(len(actions)):
        broken = after(Facts(), actions[:number])
        assert after(broken, install_actions(SHIPPED, wish, broken)) == whole
    unread = replace(whole, needs_reload=True)
    assert install_actions(SHIPPED, wish, unread) == (Run(("systemctl", "daemon-reload")),)


def test_secrets_are_for_root_and_the_units_group() -> None:
    """The key, the settings and the environment file are not readable by others."""
    wish = replace(SETTLED, certificates={"key.pem": b"secret"})
    modes = {
        action.path: action.mode for action in install_actions(SHIPPED, wish, Facts()) if isinstance(action, Write)
    }
    assert modes[f"{CERTIFICATES}/key.pem"] == modes[SETTINGS] == 0o640
    assert modes[ENVIRONMENT] == 0o600


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
    assert without == (Delete(CUDA), Run(("systemctl", "daemon-reload")))
    assert needs_restart(without, done)


def test_uninstall_keeps_settings_and_state() -> None:
    """The service leaves cleanly before its files go. A drop-in of the user's stays; purge leaves nothing."""
    wish = replace(SETTLED, has_card=True, certificates={"key.pem": b"3"})
    installed = after(Facts(), install_actions(SHIPPED, wish, Facts()))
    installed = replace(installed, files={**installed.files, f"{DROP_INS}/override.conf": b"mine"})
    actions = uninstall_actions(installed, purge=False)
    assert actions[0] == Run(("systemctl", "stop", "headway"))
    left = after(installed, actions)
    assert {SETTINGS, ENVIRONMENT, f"{CERTIFICATES}/key.pem", f"{DROP_INS}/override.conf"} == {*left.files}
    assert {FOLDER, STATE, DROP_INS} == {*left.folders}
    assert after(left, uninstall_actions(left, purge=True)) == Facts(folders=set())
    assert uninstall_actions(Facts(), purge=True) == ()


@pytest.mark.parametrize("purge", [False, True])
def test_a_removal_that_broke_off_is_completed(purge: bool) -> None:
    """After each action of the first call: the same end, and systemd forgets the unit whose file is gone."""
    wish = replace(SETTLED, has_card=True, certificates={"key.pem": b"3"})
    installed = after(Facts(), install_actions(SHIPPED, wish, Facts()))
    actions = uninstall_actions(installed, purge=purge)
    for number in range(len(actions)):
        done = actions[:number]
        broken = replace(after(installed, done), needs_reload=Delete(UNIT) in done and RELOAD not in done)
        rest = uninstall_actions(broken, purge=purge)
        assert after(broken, rest) == after(installed, actions)
        assert RELOAD in (*done, *rest)


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
