"""How a decision fits etcd's limits: what must be one step stays one, what is only noted follows. Pure.

Notes, such as a failure that a node is charged with, end with a lease, which etcd has to grant first. A recovery does
not wait for that. And etcd refuses a transaction with more than 128 comparisons or changes: a decision changes a few
keys, and notes grow with the cluster. A leader that dies in between loses notes, never a decision.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Final

from headway.daemon.coordination.commands import Transaction

MAX_OPERATIONS: Final = 128
"""Changes of one transaction, and comparisons: etcd's `--max-txn-ops`."""


def parts(decided: Transaction) -> tuple[Transaction, ...]:
    """The decision, then the keys that it has leased. The shell compares its own key in each."""
    num_changes = len(decided.puts) + len(decided.deletes)
    assert num_changes <= MAX_OPERATIONS, "what a decision changes is bounded: see MAX_SWEPT and MAX_TRIMMED"
    return replace(decided, leased={}), *_notes(decided)


def _notes(decided: Transaction) -> Iterator[Transaction]:
    leased = iter(decided.leased.items())
    while batch := dict(islice(leased, MAX_OPERATIONS)):
        yield Transaction(job=decided.job, reason=decided.reason, leased=batch)
