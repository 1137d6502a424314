"""How a decision fits etcd's limit of operations: what must be one step stays one, what is only noted follows. Pure.

etcd refuses a transaction with more than 128 comparisons or changes. A decision changes a handful of keys, but charges
a failure to every node that was lost: those notes are what grows with the cluster. As many as fit are written with the
decision; the others follow in parts of their own. A leader that dies in between loses notes, never a decision.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Final

from headway.daemon.coordination.commands import Transaction

MAX_OPERATIONS: Final = 128
"""Changes of one transaction, and comparisons: etcd's `--max-txn-ops`."""


def parts(decided: Transaction) -> tuple[Transaction, ...]:
    """The decision with as many leased keys as fit, then the rest of those. The shell compares its own key in each."""
    room = MAX_OPERATIONS - len(decided.puts) - len(decided.deletes)
    assert room >= 0, "what a decision changes besides is bounded: see MAX_SWEPT and MAX_TRIMMED"
    leased = iter(decided.leased.items())
    first = replace(decided, leased=dict(islice(leased, room)))
    return first, *_rest(decided, leased)


def _rest(decided: Transaction, leased: Iterator[tuple[str, tuple[bytes, int]]]) -> Iterator[Transaction]:
    while batch := dict(islice(leased, MAX_OPERATIONS)):
        yield Transaction(job=decided.job, reason=decided.reason, leased=batch)
