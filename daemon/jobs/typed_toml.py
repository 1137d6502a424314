"""Reads TOML as typed values: dataclasses field by field, strictly, or one line that says what is wrong and where.
Pure.

An unknown key is refused with the nearest right name, or with its right section. For any text, the reader gets a value
or a ConfigError, and nothing else.
"""

import dataclasses
import difflib
import math
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec

from headway.daemon.base.errors import ConfigError
from headway.daemon.base.near_path import near
from headway.stages.plugin_names import Setting, Settings

MAX_BYTES: Final = 1 << 20
"""Maximum size; a hand-written file has a hundredth of it."""
MAX_DOTS: Final = 256
"""Maximum number of dots in one line, because tomllib's time for a dotted key grows with the square of its parts."""
MAX_PLACE: Final = 200
"""Maximum characters of a key in an error."""
OTHER_WORDS: Final = {
    "gpu": "cuda",
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "bfloat16",
    "half": "bfloat16",
    "lora": "adapter",
    "peft": "adapter",
    "r": "rank",
    "layers": "num_hidden_layers",
    "blocks": "num_hidden_layers",
    "heads": "num_attention_heads",
    "num_heads": "num_attention_heads",
}
"""Words that people write for a name that is not the nearest by letters."""

NOT_IN_FILES: Final = "not_in_files"
"""Metadata of a field that no file may name."""

Place = tuple[str, ...]
"""Place of a value in a file: keys from the outside in."""
Check = Callable[[type, dict[str, Any], Place], None]
"""Called with every table before its values are read; may raise ConfigError."""


def read_text(path: Path, what: str) -> str:
    """Return a file's text; `what` names its kind in errors. Raises ConfigError, one line."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ConfigError(f"is larger than {MAX_BYTES >> 20} MiB, the maximum of a {what}", str(path))
        return raw.decode("utf-8-sig")  # some editors begin a file with a byte-order mark
    except FileNotFoundError as error:
        raise ConfigError(f"no such {what}{near(path)}", str(path)) from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"line {line} is not UTF-8; save this {what} in that encoding", str(path)) from error
    except (OSError, ValueError) as error:  # ValueError: a path with a zero character
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"cannot read this {what}: {reason}", str(path)) from error


def read_typed(text: str, kind: type, source: str) -> Any:
    """Return TOML text as the dataclass `kind`; `source` names it in errors. Raises ConfigError at
    `source:section.key`.
    """
    return read_table(parse_toml(text, source), kind, source)


def read_table(raw: dict[str, Any], kind: type, source: str, *, check: Check = lambda _kind, _raw, _place: None) -> Any:
    """Return parsed TOML as the dataclass `kind`; raises as `read_typed`."""
    return _Reader(kind, source, check).table(raw, kind, ())


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """Return TOML text as nested dicts. Raises ConfigError for any error in it."""
    if len(text) > MAX_BYTES:
        raise ConfigError(f"is larger than {MAX_BYTES >> 20} MiB", source)
    for number, line in enumerate(text.split("\n"), start=1):
        if line.count(".") > MAX_DOTS:
            raise ConfigError(f"line {number} has more than {MAX_DOTS} dots", source)
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ConfigError("not valid TOML here: it is nested too deeply", source) from error
    except ValueError as error:  # TOMLDecodeError, and the errors of int and datetime
        raise ConfigError(f"not valid TOML: {error}", source) from error


def where(source: str, place: Place) -> str:
    """Return `file:section.key`."""
    key = ".".join(place)
    return f"{source}:{key if len(key) <= MAX_PLACE else key[:MAX_PLACE] + '…'}" if place else source


def nearest(word: str, known: list[str]) -> str:
    """Return the hint for an unknown name; empty when no name is near."""
    if (meant := OTHER_WORDS.get(word.lower())) in known:
        return f"; did you mean `{meant}`?"
    matches = difflib.get_close_matches(word[:MAX_PLACE].lower(), known, n=1, cutoff=0.6)
    return f"; did you mean `{matches[0]}`?" if matches else ""


def _keys_of(kind: type) -> "dict[str, dataclasses.Field[Any]]":
    """Return the fields of a dataclass that a file may name."""
    return {item.name: item for item in dataclasses.fields(kind) if not item.metadata.get(NOT_IN_FILES)}


class _Reader:
    """The reader of one file."""

    def __init__(self, root: type, source: str, check: Check) -> None:
        self._root = root
        self._source = source
        self._check = check

    def table(self, raw: object, kind: type, place: Place) -> Any:
        """Return a TOML table as a dataclass."""
        if not isinstance(raw, dict):
            raise ConfigError(f"expected a table, got {_type_name(raw)}", self._at(place))
        hints = get_type_hints(kind)
        fields = _keys_of(kind)
        for key in raw:
            if key not in fields:
                raise ConfigError(self._unknown(key, list(fields), place), self._at((*place, key)))
        self._check(kind, raw, place)
        values: dict[str, Any] = {}
        for name, item in fields.items():
            if name in raw:
                values[name] = self._value(raw[name], hints[name], (*place, name))
            elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
                if not dataclasses.is_dataclass(hints[name]):
                    raise ConfigError(f"`{name}` is missing", self._at(place))
                values[name] = self.table({}, hints[name], (*place, name))  # names the key that is missing
        return kind(**values)

    def _value(self, raw: object, kind: Any, place: Place) -> Any:
        """Return one value as a field's type. An integer may stand for a float; no other conversion is allowed."""
        if dataclasses.is_dataclass(kind):
            return self.table(raw, kind, place)  # type: ignore[arg-type]
        if get_origin(kind) is tuple and dataclasses.is_dataclass(of := get_args(kind)[0]):
            return self._tables(raw, of, place)  # type: ignore[arg-type]
        if kind == Settings:
            if not isinstance(raw, dict):
                raise ConfigError(f"expected a table, got {_type_name(raw)}", self._at(place))
            return tuple(sorted((key, self._value(raw[key], Setting, (*place, key))) for key in raw))
        at = self._at(place)
        if get_origin(kind) is Literal:
            choices = [str(choice) for choice in get_args(kind)]
            if not isinstance(raw, str) or raw not in choices:
                hint = nearest(raw, choices) if isinstance(raw, str) else ""
                told = ", ".join(choice or '""' for choice in choices)
                raise ConfigError(f"{_show(raw)} is not one of {told}{hint}", at)
            return raw
        try:
            value = msgspec.convert(raw, type=kind, strict=True)
        except (OverflowError, RecursionError) as error:
            raise ConfigError(f"is out of range or nested too deeply ({_show(raw)})", at) from error
        except msgspec.ValidationError as error:
            reason, _, inside = str(error).replace("`", "").partition(" - at $")
            reason = reason[:1].lower() + reason[1:]
            raise ConfigError(f"{reason} ({_show(raw)})", at + inside) from error
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise ConfigError(f"expected a finite number, got {number}", at)
        return value

    def _tables(self, raw: object, kind: type, place: Place) -> tuple[Any, ...]:
        """Return an array of tables; the entries count from 0."""
        if not isinstance(raw, list):
            key = place[-1]
            raise ConfigError(f"expected [[{key}]], an array of tables, got {_type_name(raw)}", self._at(place))
        return tuple(self.table(entry, kind, (*place[:-1], f"{place[-1]}[{index}]")) for index, entry in enumerate(raw))

    def _unknown(self, key: str, known: list[str], place: Place) -> str:
        """Return the sentence for an unknown key, with the nearest valid name here or the section in which it
        is valid.
        """
        what = "unknown key" if place else "unknown section"
        if hint := nearest(key, known):
            return what + hint
        sections = get_type_hints(self._root)
        if place and dataclasses.is_dataclass(sections.get(key)):
            return f"{what}; it is a section of its own: [{key}]"
        for section, kind in sections.items():
            if isinstance(kind, type) and dataclasses.is_dataclass(kind) and key in _keys_of(kind):
                return f"{what}; it belongs in [{section}]"
        return f"{what}; there are {', '.join(known)}"

    def _at(self, place: Place) -> str:
        return where(self._source, place)


def _show(raw: object) -> str:
    if isinstance(raw, int) and not isinstance(raw, bool) and abs(raw) >= 10**30:
        return f"a number of {raw.bit_length()} bits"  # Python refuses to print very long ones
    try:
        text = repr(raw) if not isinstance(raw, bool) else str(raw).lower()
    except (ValueError, RecursionError):
        text = _type_name(raw)
    return text if len(text) <= 60 else text[:57] + "..."


def _type_name(raw: object) -> str:
    names = {str: "a string", int: "an integer", float: "a number", bool: "true or false", list: "an array"}
    return {**names, dict: "a table"}.get(type(raw), type(raw).__name__)
