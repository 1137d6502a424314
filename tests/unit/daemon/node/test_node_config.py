"""A node's settings, and the certificate that has to fit them."""

import asyncio
import re
import socket
from pathlib import Path

import pytest

from headway.daemon.base.addresses import join_address, read_ports, split_address
from headway.daemon.base.errors import ConfigError
from headway.daemon.blobs.state_store import StateStore
from headway.daemon.net.certificates import CertificateAuthority
from headway.daemon.node import relay_host
from headway.daemon.node.config import advertised_host, check_worker_ports, listen_address, read_node_config
from headway.daemon.node.identity import read_identity
from headway.daemon.node.settings import FIELD_NAMES, NodeConfig
from headway.stages.sockets.roles import Role
from headway.stages.sockets.tls_identity import NEWEST


def write(path: Path, text: str) -> Path:
    """A settings file."""
    path.write_text(text)
    return path


def test_flags_count_more_than_variables_and_those_more_than_the_file(tmp_path: Path) -> None:
    """The file sets three keys, a variable one of them, a flag another: each the last word."""
    file = write(tmp_path / "d.toml", 'site = "file"\nname = "file"\nlease_ttl_s = 7\netcd = ["a:1"]\n')
    config = read_node_config(
        file, {"HEADWAY_SITE": "variable", "HEADWAY_NAME": "variable", "HOME": "/"}, {"name": "flag", "devices": None}
    )
    assert (config.site, config.name, config.lease_ttl_s, config.etcd) == ("variable", "flag", 7, ("a:1",))


def test_every_secret_of_a_node_is_kept_from_jobs() -> None:
    """Keys, the authority's key, and the password."""
    assert NodeConfig(certificates=Path("/c"), state_dir=Path("/s")).secrets == [Path("/c"), Path("/s/certificates")]
    settings = NodeConfig(certificates=Path("/c"), authority=Path("/a"), etcd_password_file=Path("/p"))
    assert {*settings.secrets} > {Path("/c"), Path("/a"), Path("/p")}


def test_variables_are_text_and_become_what_the_field_is() -> None:
    """Numbers, paths and lists arrive as text."""
    config = read_node_config(
        None,
        {
            "HEADWAY_STOP_TIMEOUT_S": "2.5",
            "HEADWAY_STATE_DIR": "/s",
            "HEADWAY_ETCD": "a:1,b:2",
            "HEADWAY_ALLOWED_PLACES": "/srv,s3://lab",
        },
    )
    assert (config.stop_timeout_s, config.state_dir, config.etcd) == (2.5, Path("/s"), ("a:1", "b:2"))
    assert config.allowed_places == ("/srv", "s3://lab")


@pytest.mark.parametrize(
    ("in_file", "variables", "flag", "folder"),
    [
        ("", {"HEADWAY_CERTS": "/me"}, None, "/me"),
        ("", {"HEADWAY_CERTS": ""}, None, str(NodeConfig().certificates)),
        ("", {"HEADWAY_CERTS": "/me", "HEADWAY_CERTIFICATES": "/d"}, None, "/d"),
        ("/node", {"HEADWAY_CERTS": "/me"}, None, "/node"),
        ("/node", {"HEADWAY_CERTS": "/me", "HEADWAY_CERTIFICATES": "/d"}, None, "/d"),
        ("/node", {"HEADWAY_CERTS": "/me"}, Path("/f"), "/f"),
    ],
)
def test_a_persons_certificates_count_for_a_daemon_that_names_none(
    tmp_path: Path, in_file: str, variables: dict[str, str], flag: Path | None, folder: str
) -> None:
    """HEADWAY_CERTS counts less than a flag, HEADWAY_CERTIFICATES and a file that names a folder; empty, nothing."""
    file = write(tmp_path / "d.toml", f'certificates = "{in_file}"\n' if in_file else 'site = "s"\n')
    assert read_node_config(file, variables, {"certificates": flag}).certificates == Path(folder)


def test_the_host_name_is_the_nodes_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody gave a name."""
    monkeypatch.setattr("socket.gethostname", lambda: "machine")
    config = read_node_config(None, {})
    assert config.name == "machine"
    assert advertised_host(config) == "machine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('sites = "x"', r"d\.toml: unknown key 'sites'; did you mean 'site'\?"),
        ("site_is_private = true", r"site_is_private = True: name the site with `site`"),
        ("lease_ttl_s = 0", r"lease_ttl_s = 0: at least 1 second"),
        ('lease_ttl_s = "soon"', r"lease_ttl_s = 'soon': Expected `int`"),
        ('devices = "tpu"', r"devices = 'tpu': Invalid enum value 'tpu'"),
        ("transfer_mbit_s = 0.5", r"transfer_mbit_s = 0\.5: at least 1 Mbit/s, or 0 for no limit"),
        ("num_spares = -1", r"num_spares = -1: must not be negative"),
        ("quarantine_after = -1", r"quarantine_after = -1: must not be negative"),
        ("stop_timeout_s = -1.0", r"stop_timeout_s = -1\.0: must not be negative"),
        ('name = "a/b"', r"name = 'a/b': a node's name is 1 to 253 letters"),
        ('name = ".."', r"name = '\.\.': a node's name is 1 to 253 letters"),
        ('name = "a\\u001b[2J"', r"name = 'a\\x1b\[2J': a node's name is 1 to 253 letters"),
        ('site = "a\\nb"', r"site = 'a\\nb': a site's name is 1 to 1024 printable"),
        ('listen = "localhost"', r"listen: 'localhost' is not host:port"),
        ('etcd_user = "me"', r"etcd_user = 'me': needs etcd_password_file too"),
        ("etcd = []", r"name at least one host:port"),
        ('allowed_places = ["srv"]', r"allowed_places = \('srv',\): 'srv' is neither an absolute path nor a URL"),
        ("site = ", r"d\.toml: not valid TOML"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    """The line names the file or the key and what is wrong."""
    with pytest.raises(ConfigError, match=message) as caught:
        read_node_config(write(tmp_path / "d.toml", text), {})
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """--config names a file that is not there."""
    with pytest.raises(ConfigError, match=r"none\.toml: no such settings file"):
        read_node_config(tmp_path / "none.toml", {})


def test_a_misspelt_variable_is_reported() -> None:
    """HEADWAY_STATEDIR is a slip; HEADWAY_ETCD_BINARY and HEADWAY_DEBUG belong to other parts."""
    read_node_config(None, {"HEADWAY_ETCD_BINARY": "/bin/etcd", "HEADWAY_DEBUG": "1"})
    with pytest.raises(ConfigError, match=r"HEADWAY_STATEDIR: unknown variable; did you mean HEADWAY_STATE_DIR\?"):
        read_node_config(None, {"HEADWAY_STATEDIR": "/s"})


def test_addresses() -> None:
    """IPv6 in brackets or without, a wildcard that nobody can dial, and the host that was told."""
    assert listen_address(NodeConfig(name="n", listen="[::1]:70")) == ("::1", 70)
    assert advertised_host(NodeConfig(name="n", listen="10.0.0.7:0")) == "10.0.0.7"
    assert advertised_host(NodeConfig(name="n", advertise_host="far", listen="10.0.0.7:0")) == "far"
    for told in ("fd00::7", "[fd00::7]"):
        assert advertised_host(NodeConfig(name="n", advertise_host=told)) == "fd00::7"
    assert (join_address("fd00::7", 70), join_address("far", 70)) == ("[fd00::7]:70", "far:70")


def test_a_port_may_be_any_and_a_host_every_one() -> None:
    """Port 0 takes a free one, the last one there is is taken, and no host means every address."""
    told = ("0.0.0.0:0", "[::]:65535", ":7070")
    assert [split_address(text, "listen") for text in told] == [("0.0.0.0", 0), ("::", 65535), ("", 7070)]


IPV6_WITHOUT_ITS_BRACKETS = ("::1", "fd00::7:70", "[::1:70", "::1]:70", "[[::1]:70", "[[::1]]:70", "[::1]", "[::1]70")
NO_IPV6_IN_BRACKETS = ("[far]:70", "[]:70", "f[a]r:70")
NO_PORT = ("far", "far:", "far:-1", "far:7a", "far:65536", "far:٧", "far:" + "7" * 5000)


@pytest.mark.parametrize("text", [*IPV6_WITHOUT_ITS_BRACKETS, *NO_IPV6_IN_BRACKETS, *NO_PORT])
def test_an_invalid_host_and_port_is_one_line(text: str) -> None:
    """Brackets where none belong or none where they do, or no port: the line names the setting, and what to write."""
    for key in ("listen", "metrics_listen"):
        with pytest.raises(ConfigError) as caught:
            read_node_config(None, {}, {key: text})
        assert str(caught.value) == f"{key}: {text!r} is not host:port; brackets stand around an IPv6 address"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("7100-", "'7100-' is not a range of ports such as 7100-7107"),
        ("7100-7107-7110", "'7100-7107-7110' is not a range of ports such as 7100-7107"),
        ("seven", "'seven' is not a range of ports such as 7100-7107"),
        ("7107-7100", "'7107-7100': ports rise from 1 to 65535"),
        ("0", "'0': ports rise from 1 to 65535"),
        ("65530-65536", "'65530-65536': ports rise from 1 to 65535"),
        ("7070-7080", "worker_ports = '7070-7080': has the daemon's own port 7071, which `listen` names"),
    ],
)
def test_an_invalid_range_of_ports_is_one_line(text: str, line: str) -> None:
    """The line names the setting and what is wrong with it."""
    with pytest.raises(ConfigError) as caught:
        read_node_config(None, {}, {"worker_ports": text, "listen": "0.0.0.0:7071"})
    assert str(caught.value).endswith(line)
    assert "worker_ports" in str(caught.value)


def test_a_node_needs_a_port_for_each_worker_and_each_spare() -> None:
    """Two devices and one spare fit three ports, not two; without a range nothing is counted."""
    assert list(read_ports("7100-7102", "worker_ports")) == [7100, 7101, 7102]
    check_worker_ports(NodeConfig(worker_ports="7100-7102"), 2)
    check_worker_ports(NodeConfig(), 100)
    with pytest.raises(ConfigError, match="2 workers and 1 spares need 3 ports"):
        check_worker_ports(NodeConfig(worker_ports="7100-7101"), 2)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"one_port": True, "worker_ports": "7100"}, "with one_port, workers have no ports of their own"),
        ({"announce": "203.0.113.7:41022"}, "needs one_port = true"),
        ({"one_port": True, "announce": "203.0.113.7"}, "is not host:port"),
        ({"relay": "gpu-1:7070"}, "needs one_port = true and no announce"),
        ({"authority": "ca"}, "authority = 'ca': needs one_port = true (--one-port): new machines have no certificate"),
        ({"one_port": True, "relay": "gpu-1"}, "is not host:port"),
    ],
)
def test_settings_of_one_port_that_contradict_each_other_are_one_line(flags: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(line)):
        read_node_config(None, {}, flags)


def test_two_state_folders_have_two_stores(tmp_path: Path) -> None:
    """Two clusters on one machine may both have a node-1: their layer files lie apart."""
    one, two = (NodeConfig(name="node-1", state_dir=tmp_path / letter).layer_store_dir for letter in "ab")
    assert one != two


def test_history_is_recorded_where_a_folder_is_named_for_it() -> None:
    """Off by default; the variable that `headway up` hands on turns it on."""
    assert NodeConfig().history_dir is None
    assert read_node_config(None, {"HEADWAY_HISTORY_DIR": "/h"}).history_dir == Path("/h")


def test_the_example_is_readable() -> None:
    """systemd/daemon.toml has no key that is refused."""
    example = Path(__file__).parents[4] / "systemd" / "daemon.toml"
    assert read_node_config(example, {}).site == "berlin"


def test_the_example_has_every_setting() -> None:
    """systemd/daemon.toml names each key, set or behind #, but the one for clusters on one machine."""
    example = Path(__file__).parents[4] / "systemd" / "daemon.toml"
    keys = re.findall(r"^(?:# )?(\w+) = ", example.read_text(), flags=re.MULTILINE)
    assert sorted([*keys, "checkpoint_root"]) == sorted(FIELD_NAMES)


def test_a_store_is_a_folder_of_its_own_below_the_one_that_is_named(tmp_path: Path) -> None:
    """A store is emptied when its daemon starts and deleted when it ends: files of people in that folder stay."""
    (tmp_path / "thesis.tex").write_text("ours")
    config = NodeConfig(name="node-1", store_dir=tmp_path)
    store = StateStore(config.layer_store_dir)
    store.open()
    asyncio.run(store.close())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_certificate_has_to_bear_the_nodes_name(tmp_path: Path) -> None:
    """That of node-a serves node-a, also in capitals, and no other node: the line has both names and what to do."""
    folder = CertificateAuthority.create(tmp_path / "ca").issue("node-a", hosts=["10.0.0.7"])
    read_identity(NodeConfig(name="node-a", certificates=folder))
    read_identity(NodeConfig(name="Node-A", certificates=folder))
    with pytest.raises(ConfigError) as caught:
        read_identity(NodeConfig(name="node-b", certificates=folder))
    bears = "bears node-a, localhost, 10.0.0.7, 127.0.0.1, ::1, and not this node's name node-b"
    assert str(caught.value) == f"{folder}/cert.pem: {bears}: `headway certs` makes one that does"


def test_a_renamed_machine_is_told_how_its_node_keeps_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --name a node is called as its machine; after a renaming the line has the option that it needs."""
    folder = CertificateAuthority.create(tmp_path / "ca").issue("node-a", hosts=["10.0.0.7"])
    monkeypatch.setattr(socket, "gethostname", lambda: "renamed")
    with pytest.raises(ConfigError, match=r"not this node's name renamed: .*, or --name node-a keeps the node"):
        read_identity(read_node_config(environment={}, flags={"certificates": folder}))


def test_renewals_in_a_copied_state_folder_are_another_nodes(tmp_path: Path) -> None:
    """node-b begins with a copy of node-a's state folder, where a later certificate of node-a lies: its own counts."""
    authority = CertificateAuthority.create(tmp_path / "ca")
    own, foreign = authority.issue("node-b"), authority.issue("node-a")
    config = NodeConfig(name="node-b", certificates=own, state_dir=tmp_path / "state")
    config.renewals_dir.mkdir(parents=True)
    (config.renewals_dir / "1").symlink_to(foreign)
    (config.renewals_dir / NEWEST).symlink_to("1")
    identity, _ = read_identity(config)
    assert identity.now().certificate == (own / "cert.pem").read_bytes()


def test_a_name_in_every_certificate_cannot_name_a_node(tmp_path: Path) -> None:
    """A machine that calls itself localhost needs a configured name."""
    folder = CertificateAuthority.create(tmp_path / "ca").issue("node-a")
    with pytest.raises(ConfigError, match="every machine's name"):
        read_identity(NodeConfig(name="localhost", certificates=folder))


@pytest.mark.parametrize("role", [Role.OPERATOR, Role.READER])
async def test_people_run_neither_a_daemon_nor_a_relay(tmp_path: Path, role: Role) -> None:
    """Before anything listens, in one line that names the file, the holder and what is needed."""
    folder = CertificateAuthority.create(tmp_path / "ca").issue("ann", role=role)
    with pytest.raises(ConfigError) as daemons:
        read_identity(NodeConfig(name="ann", certificates=folder))
    with pytest.raises(ConfigError) as relays:
        async with asyncio.timeout(5):
            await relay_host._serve(relay_host.RelayConfig(listen="127.0.0.1:0", certificates=folder))
    told = f"{folder}/cert.pem: is of ann ({role}), and {{}} needs a node's: `headway certs` makes one"
    assert str(daemons.value) == told.format("a daemon")
    assert str(relays.value) == told.format("a relay")
