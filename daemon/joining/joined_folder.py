"""The folder of a machine that has joined: its identity and, for a node, its settings."""

import json
import shlex
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from headway.daemon.errors import ConfigError
from headway.daemon.joining.join_client import Joined
from headway.daemon.joining.join_token import JoinToken
from headway.daemon.joining.signing_request import NEXT_KEY, next_key, signing_request
from headway.daemon.rpc.certificates import names_in, write_private
from headway.daemon.rpc.own_certificate import read_certificate
from headway.stages.durable import make_durable
from headway.stages.sockets.roles import Role, holder
from headway.stages.sockets.tls_identity import CA_FILE, CERTIFICATE_FILE, KEY_FILE

SETTINGS_FILE: Final = "daemon.toml"


class JoinedFolder:
    """A folder in which nothing of an earlier identity is. An attempt that was cut off may be repeated there."""

    def __init__(self, folder: Path, token: JoinToken) -> None:
        """Make it, with this machine's key. Raises ConfigError; the token is still good then."""
        self.folder = folder
        self._name = token.name
        if all((folder / name).exists() for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE)):
            start = f": start it with `{start_command(folder)}`" if (folder / SETTINGS_FILE).exists() else ""
            raise ConfigError(
                f"has joined already{_as_whom(folder)}{start}; or name another folder with --dir", str(folder)
            )
        files = [KEY_FILE] if (folder / NEXT_KEY).exists() else [CA_FILE, CERTIFICATE_FILE, KEY_FILE, SETTINGS_FILE]
        if there := [name for name in files if (folder / name).exists()]:
            raise ConfigError(f"has {there[0]} already; name another folder with --dir", str(folder))
        with self._told():
            # It lies there before anybody is asked: the authority gives a certificate to this key alone.
            self.request = signing_request(token.name, next_key(folder, b""))

    def keep(self, joined: Joined, settings: dict[str, object]) -> None:
        """Write the files, and last of all the key. settings: keys of a node's settings that the user gave.

        Raises ConfigError; then the same line does it again.
        """
        answer = joined.answer
        ssl.PEM_cert_to_DER_cert(answer.certificate)
        files = {CERTIFICATE_FILE: answer.certificate.encode(), CA_FILE: answer.authority.encode()}
        if answer.role == Role.NODE:
            files[SETTINGS_FILE] = node_settings(self._name, joined, settings).encode()
        with self._told():
            for name, content in files.items():
                write_private(self.folder / name, content)
                make_durable(self.folder / name)
            make_durable(self.folder)  # the key says that all the others are there
            (self.folder / NEXT_KEY).replace(self.folder / KEY_FILE)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Translate errors of files. Raises ConfigError."""
        try:
            yield
        except OSError as error:
            where = str(error.filename or self.folder)
            raise ConfigError(f"cannot be written: {error.strerror}; then run the same line again", where) from error


def _as_whom(folder: Path) -> str:
    """Return ` as NAME (ROLE)`, as the folder's certificate says; empty if it cannot be read."""
    try:
        return f" as {holder(names_in(read_certificate((folder / CERTIFICATE_FILE).read_bytes(), CERTIFICATE_FILE)))}"
    except (OSError, ConfigError):
        return ""


def identity_flags(folder: Path) -> str:
    """Return what names a joined node's settings and certificate on a command line."""
    return shlex.join(["--config", str(folder / SETTINGS_FILE), "--certs", str(folder)])


def start_command(folder: Path) -> str:
    """Return the line that starts the daemon of a joined node. Its state lies there too, not in the system's folder."""
    return f"headway daemon {identity_flags(folder)} --state-dir {shlex.quote(str(folder / 'state'))}"


def relay_command(folder: Path, joined: Joined) -> str:
    """Return the line that makes the machine of a joined node a relay instead."""
    return shlex.join(["headway", "relay", "--certs", str(folder), "--etcd", ",".join(joined.answer.etcd)])


def shell_settings(folder: Path, joined: Joined) -> str:
    """Return the line that names cluster and certificate to the shell of a person who has joined."""
    named = {"HEADWAY_ETCD": ",".join(joined.answer.etcd), "HEADWAY_CERTS": str(folder.absolute())}
    return "export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in named.items())


def node_settings(name: str, joined: Joined, settings: dict[str, object]) -> str:
    """Return the settings of a new node in TOML."""
    told: dict[str, object] = {
        "name": name,
        "etcd": list(joined.answer.etcd),
        "one_port": True,
        "listen": "0.0.0.0:7070",
        "advertise_host": joined.own_host,
    } | {key: value for key, value in settings.items() if value is not None}
    head = "# Written by `headway join`; `headway config show` names all keys.\n"
    # Texts, lists of texts and booleans are the same in JSON and in TOML.
    return head + "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in told.items())
