"""Decides where a job's token shards may lie: a folder of the submitting machine, or a URL that nodes read. Pure."""

from typing import Final

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
