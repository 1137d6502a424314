"""The sandbox of chat templates: jinja2 as transformers sets it up, but with a date that stands still.

Everything in this file is called while a template renders.
"""

import json
import re
from collections.abc import Callable
from datetime import date
from typing import Any, Final

from headway.daemon.data.documents import library
from headway.daemon.data.special_words import GUARD
from headway.daemon.data.template_limits import limited_product

_ESCAPED_GUARD: Final = re.compile(rf"(?<!\\)((?:\\\\)*)\\u{ord(GUARD):04x}")
"""A backslash that people wrote is two in JSON, and escapes nothing."""


def sandbox(*, today: date, mark: Callable[[str], str]) -> Any:
    """Return jinja2's environment. mark receives what a template emits between `{% generation %}` and its end."""
    jinja2, sandboxes = library("jinja2"), library("jinja2.sandbox")
    nodes, extensions = library("jinja2.nodes"), library("jinja2.ext")

    def parse(self: Any, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def marked(_self: Any, caller: Any) -> str:
        return mark(caller())

    generation = type("Generation", (extensions.Extension,), {"tags": {"generation"}, "parse": parse, "_mark": marked})
    limits = {"intercepted_binops": frozenset({"*", "**"}), "call_binop": limited_product}
    environment = type("Sandbox", (sandboxes.ImmutableSandboxedEnvironment,), limits)(
        trim_blocks=True, lstrip_blocks=True, extensions=[generation, extensions.loopcontrols]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = today.strftime
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return _ESCAPED_GUARD.sub(rf"\1{GUARD}", text) if ensure_ascii else text
