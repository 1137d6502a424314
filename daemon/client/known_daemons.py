"""Which daemons a cluster had when this user last asked its etcd: whom to ask while etcd is away.

A local cluster's folder names its daemons. Of any other cluster, each command that reads etcd leaves the addresses in
this user's cache folder. They are only dialled with TLS, by the name that the node's certificate bears.
"""

import hashlib
import secrets
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from headway.daemon.addresses import NodeEndpoint
from headway.daemon.jobs.resolve import default_cache_dir
from headway.daemon.names import is_node_name
from headway.daemon.records import NodeRecord

MAX_KNOWN: Final = 64
"""So many are kept of a large cluster: one that answers is enough."""


def remember(etcd: Sequence[str], nodes: Iterable[NodeRecord]) -> None:
    """Keep the addresses of a cluster's nodes. Best effort: a folder that cannot be written loses nothing but this."""
    endpoints = [NodeEndpoint(node.name, node.address) for node in nodes][:MAX_KNOWN]
    path, content = _path(etcd), msgspec.json.encode(endpoints)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with suppress(OSError):
        if not endpoints or (path.is_file() and path.read_bytes() == content):
            return
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft.write_bytes(content)
        draft.replace(path)


def known(etcd: Sequence[str]) -> tuple[NodeEndpoint, ...]:
    """The daemons of a cluster as they were last seen; empty: none was."""
    try:
        found = msgspec.json.decode(_path(etcd).read_bytes(), type=list[NodeEndpoint])
    except (OSError, msgspec.DecodeError, RecursionError):
        return ()
    return tuple(endpoint for endpoint in found[:MAX_KNOWN] if is_node_name(endpoint.name))


def _path(etcd: Sequence[str]) -> Path:
    digest = hashlib.sha256("\n".join(sorted(etcd)).encode()).hexdigest()[:16]
    return default_cache_dir() / "clusters" / f"{digest}.json"
