"""The daemons of a cluster when this user last read its etcd: they can be asked while etcd is away.

A local cluster's folder names its daemons. For any other cluster, each command that reads etcd leaves the addresses in
this user's cache folder. They are dialled only with TLS, by the name in the node's certificate.
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
from headway.daemon.records.records import NodeRecord

MAX_KNOWN: Final = 64
"""Maximum number of addresses kept of a large cluster; one that answers is enough."""


def remember(etcd: Sequence[str], nodes: Iterable[NodeRecord]) -> None:
    """Keep the addresses of a cluster's nodes. If the folder cannot be written, only this memory is lost."""
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
    """Return the daemons of a cluster when they were last seen; empty: none was seen."""
    try:
        found = msgspec.json.decode(_path(etcd).read_bytes(), type=list[NodeEndpoint])
    except (OSError, msgspec.DecodeError, RecursionError):
        return ()
    return tuple(endpoint for endpoint in found[:MAX_KNOWN] if is_node_name(endpoint.name))


def _path(etcd: Sequence[str]) -> Path:
    digest = hashlib.sha256("\n".join(sorted(etcd)).encode()).hexdigest()[:16]
    return default_cache_dir() / "clusters" / f"{digest}.json"
