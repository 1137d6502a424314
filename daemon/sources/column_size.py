"""The memory that a column of Arrow takes as Python objects, before these are made.

A dictionary, or lists over it, may name one long text any number of times.
"""

from typing import Any, Final

from headway.daemon.data.documents import library

VALUE_BYTES: Final = 64
"""What each value counts beside its text."""


def can_measure(kind: Any) -> bool:
    """Return whether `num_bytes` knows a type. It does not know views and runs, which few files have."""
    types = library("pyarrow").types
    if types.is_dictionary(kind) or _is_list(types, kind):
        return can_measure(kind.value_type)
    if types.is_map(kind):
        return can_measure(kind.key_type) and can_measure(kind.item_type)
    if types.is_struct(kind):
        return all(can_measure(kind.field(number).type) for number in range(kind.num_fields))
    return bool(_is_text(types, kind) or types.is_primitive(kind) or types.is_null(kind))


def num_bytes(column: Any) -> int:
    """Return about how many bytes the values of an array take, with each repetition. `can_measure` is true of it."""
    types, compute = library("pyarrow").types, library("pyarrow.compute")
    kind, own = column.type, VALUE_BYTES * len(column)
    if types.is_dictionary(kind):
        if not _is_text(types, kind.value_type):
            return own + len(column) * num_bytes(column.dictionary)
        lengths = compute.binary_length(column.dictionary).take(column.indices)
        return own + (compute.sum(lengths).as_py() or 0)
    if _is_text(types, kind):
        return own + (compute.sum(compute.binary_length(column)).as_py() or 0)
    if types.is_struct(kind):
        return own + sum(num_bytes(part) for part in column.flatten())
    if _is_list(types, kind) or types.is_map(kind):
        return own + num_bytes(column.flatten())
    return own


def _is_list(types: Any, kind: Any) -> bool:
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_text(types: Any, kind: Any) -> bool:
    of = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary, types.is_fixed_size_binary)
    return any(is_kind(kind) for is_kind in of)
