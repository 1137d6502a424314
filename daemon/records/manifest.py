"""The bytes of a checkpoint's manifest, whose last field is a digest of everything before it. Pure."""

import re
from hashlib import sha256
from typing import Any, Final

from headway.daemon.records.format import encode

_HEAD: Final = b'{"format":1,"has_digest":true,'
_SEAL: Final = re.compile(rb',"digest":"([0-9a-f]{64})"}\Z')


def sealed(manifest: dict[str, Any]) -> bytes:
    """Return a manifest's bytes: its format, its fields and the digest."""
    body = _HEAD + encode(manifest)[1:]
    return body[:-1] + b',"digest":"' + sha256(body).hexdigest().encode() + b'"}'


def check_seal(raw: bytes) -> bool:
    """Return whether a manifest has a digest: earlier releases wrote none. Raises ValueError when a byte was altered.

    Head and end both tell of the digest, so one altered byte does not make a manifest look like an earlier one.
    """
    found = _SEAL.search(raw)
    if found is None and not raw.startswith(_HEAD):
        return False
    if found is None or sha256(raw[: found.start()] + b"}").hexdigest().encode() != found[1]:
        raise ValueError("it was altered after it was written: its digest is another")
    return True
