"""Checks the names of jobs, nodes and sites: they become keys, folders and lines on terminals. Pure."""

import re
from typing import Final

_JOB: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_NODE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}(?<!\.)")
_MAX_PART: Final = 128
"""Maximum number of characters of an id that becomes a folder's name."""

LOCAL_HOSTS: Final = ("localhost", "127.0.0.1", "::1")
"""Every certificate bears these names, so none of them tells one from another."""
JOB_NAME_RULE: Final = "1 to 63 lower-case letters, digits and inner hyphens"
NODE_NAME_RULE: Final = "1 to 253 letters, digits, hyphens, underscores and inner dots, and a letter or digit first"


def is_job_name(name: str) -> bool:
    """Return whether a job may have this name; see JOB_NAME_RULE."""
    return _JOB.fullmatch(name) is not None


def is_node_name(name: str) -> bool:
    """Return whether a node may have this name; see NODE_NAME_RULE. Every host name is valid.

    None ends with a dot: TLS ignores that one, so `a.` would pass for `a`.
    """
    return _NODE.fullmatch(name) is not None


def is_path_part(text: str) -> bool:
    """Return whether an id can be the name of exactly one file or folder."""
    return len(text) <= _MAX_PART and text.isprintable() and "/" not in text and text not in (".", "..")
