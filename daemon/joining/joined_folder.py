"""The folder of a machine that has joined: its identity and, for a node, its settings."""

import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from headway.daemon.errors import ConfigError
from headway.daemon.joining.join_client import Joined
from headway.daemon.joining.join_messages import MAX_ANSWER_BYTES
from headway.daemon.joining.join_token import JoinToken
from headway.daemon.joining.signing_request import new_key, signing_request
from headway.daemon.rpc.certificates import key_pem, make_private_directory, write_private
from headway.stages.sockets.roles import Role
from headway.stages.sockets.tls_identity import CA_FILE, CERTIFICATE_FILE, KEY_FILE

SETTINGS_FILE: Final = "daemon.toml"
ROOM_FILE: Final = ".room"
"""Holds the room for the files until they are there: the token works once, so a full disk has to show before."""
ROOM_BYTES: Final = 2 * MAX_ANSWER_BYTES


class JoinedFolder:
    """A folder in which nothing of an earlier identity is."""

    def __init__(self, folder: Path, token: JoinToken) -> None:
        """Make it with room for the files, and a key in memory. Raises ConfigError; the token is still good then."""
        self.folder = folder
        self._name = token.name
        self._key = new_key()
        self.request = signing_request(token.name, self._key)
        there = [name for name in (CA_FILE, CERTIFICATE_FILE, KEY_FILE, SETTINGS_FILE) if (folder / name).exists()]
        if there:
            raise ConfigError(f"has {there[0]} already; name another folder with --dir", str(folder))
        make_private_directory(folder)
        with self._told():
            write_private(folder / ROOM_FILE, bytes(ROOM_BYTES))

    def give_up(self) -> None:
        """Give the room back, because nobody joins now."""
        with suppress(OSError):
            (self.folder / ROOM_FILE).unlink()

    def keep(self, joined: Joined, settings: dict[str, object]) -> None:
        """Write the files. settings: keys of a node's settings that the user gave. Raises ConfigError."""
        answer = joined.answer
        ssl.PEM_cert_to_DER_cert(answer.certificate)
        with self._told():
            (self.folder / ROOM_FILE).unlink()
            write_private(self.folder / KEY_FILE, key_pem(self._key))
            write_private(self.folder / CERTIFICATE_FILE, answer.certificate.encode())
            write_private(self.folder / CA_FILE, answer.authority.encode())
            if answer.role == Role.NODE:
                write_private(self.folder / SETTINGS_FILE, node_settings(self._name, joined, settings).encode())

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Translate errors of files. Raises ConfigError."""
        try:
            yield
        except OSError as error:
            self.give_up()
            where = str(error.filename or self.folder)
            raise ConfigError(f"cannot be written: {error.strerror}", where) from error


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
