"""Writes the page of a job as one file: it opens without a network, and asks no host for anything."""

from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Final

import msgspec

from headway.daemon.base.errors import ConfigError
from headway.daemon.reports.picture import Picture

STYLES: Final = ("uPlot.min.css", "page.css")
SCRIPTS: Final = ("uPlot.iife.min.js", "curves.js", "panels.js")
PAGE: Final = files("headway.daemon.reports") / "page"
"""The static files, also of a page that is served."""


def page_html(picture: Picture) -> str:
    """Return the page with its picture inside."""
    style = "\n".join(_file(name) for name in STYLES)
    script = "\n".join(map(_file, SCRIPTS))
    policy = (
        f"default-src 'none'; connect-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    inside = _inside_html(msgspec.json.encode(picture).decode())
    return Template(_file("report.html")).substitute(policy=policy, style=style, script=script, picture=inside)


def check_report(out: Path) -> None:
    """Raise ConfigError for a file that is no page of a job: it is not replaced."""
    try:
        is_ours = not out.exists() or out.read_bytes().startswith(_file("report.html").partition("$")[0].encode())
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror or error}", str(out)) from error
    if not is_ours:
        raise ConfigError("exists, and headway did not write it; name another file, or move it away", str(out))


def write_report(picture: Picture, out: Path) -> None:
    """Write the page, also over an earlier one. Raises ConfigError for a path that cannot be written or has another
    file.
    """
    check_report(out)
    draft = out.with_name(f"{out.name}.part")
    try:
        draft.write_text(page_html(picture), encoding="utf-8", errors="replace")
        draft.replace(out)
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror or error}", str(out)) from error


def _file(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    """Return what names an inline text in a Content-Security-Policy: no other text runs."""
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


def _inside_html(text: str) -> str:
    """Return JSON that cannot end the element around it: a job may be named `</script>`."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
