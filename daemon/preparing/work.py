"""Names the work of a preparation: two runs of one name write the same bytes, so one can go on with the other's."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Final

from headway.daemon.data.encoder import Encoder
from headway.daemon.preparing.preparation import Preparation
from headway.daemon.sources.text_sources import Source

_LIBRARIES: Final = ("headway", "tokenizers", "jinja2", "pyarrow")
"""Another release of these may read or encode in another way."""


RULES: Final = 13
"""Version of the rules by which texts and conversations become tokens: it rises with each change of a token."""


def name_of_work(sources: Sequence[Source], names: Sequence[str], encoder: Encoder, options: Preparation) -> str | None:
    """Return SHA-256 over options, tokenizer and inputs; None: a source could change without a trace.

    names: of the sources as they were given. Raises OSError when a source is not there any more.
    """
    identities = [source.identity for source in sources]
    if None in identities:
        return None
    described = {
        "rules": RULES,
        "options": asdict(options),
        "names": list(names),
        "sources": identities,
        "tokenizer": hashlib.sha256(encoder.file.read_bytes()).hexdigest() if encoder.file else "",
        "tokenizer_config": encoder.config,
        "end_of_text": encoder.end_of_text,
        "libraries": {name: _version(name) for name in _LIBRARIES},
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
