"""Decides where a job may write its checkpoints and read its data: one rule for every job from any source. Pure.

Every node has to see one checkpoint folder, and it outlives the processes that write it. So it is an absolute path, a
relative one below the cluster's folder (only if all nodes are on one machine), or a URL of a store that nodes share. A
store inside one process or one archive, or one that cannot be written, is not allowed.
"""

from pathlib import PurePosixPath
from typing import Final

_LOCAL: Final = ("file", "local")
STORES: Final = (
    *("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl"),
    *("hdfs", "webhdfs", "sftp", "ssh", "smb", "oss", "oci", "obs", "tos", "cos", "swift", "dbfs", "lakefs"),
)
"""Schemes of what several nodes can write."""


def is_store(checkpoint_dir: str) -> bool:
    """Return whether a folder is in a store, to which each node needs its own access."""
    scheme, separator, _ = checkpoint_dir.partition("://")
    return bool(separator) and scheme not in _LOCAL


def why_no_place(checkpoint_dir: str) -> str:
    """Return why checkpoints cannot be stored in a folder, as the end of a sentence about the key; empty: they can."""
    if not checkpoint_dir.strip():
        return "is empty; name a folder or a URL"
    scheme, separator, rest = checkpoint_dir.partition("://")
    if "::" in checkpoint_dir:
        return f"{checkpoint_dir!r} chains file systems with `::`; name the folder itself"
    if not separator:
        path = checkpoint_dir
    elif scheme in _LOCAL:
        if not rest.startswith("/"):
            return f"{checkpoint_dir!r} is relative, which a URL cannot be; write {scheme}:///absolute/path"
        path = rest
    elif scheme not in STORES:
        known = ", ".join(("file", *STORES))
        return f"{scheme}:// is not a store that every node can write to and read from; these are: {known}"
    elif not rest.strip("/"):
        return f"{checkpoint_dir!r} names no bucket or host; write {scheme}://NAME/folder"
    else:
        path = rest
    if ".." in PurePosixPath(path).parts:
        return f"{checkpoint_dir!r} leads out of its folder with `..`; write the path without it"
    return ""


_READ: Final = (
    *("http", "https", "hf", "file", "local", "s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl"),
    *("hdfs", "webhdfs", "sftp", "ssh", "smb", "oss", "oci", "obs", "tos", "cos", "swift", "dbfs", "lakefs"),
)


def is_url(source: str) -> bool:
    """Return whether a data source is a URL."""
    return "://" in source


def why_no_url(source: str) -> str:
    """Return why nodes do not read data at a URL, as the end of a sentence about the key; empty: they do."""
    scheme, _, rest = source.partition("://")
    if "::" in source:
        return f"{source!r} chains file systems with `::`; name the folder itself"
    if scheme not in _READ:
        return f"{scheme}:// is not read; these are: {', '.join(_READ)}"
    if not rest.strip("/"):
        return f"{source!r} names no folder"
    return ""
