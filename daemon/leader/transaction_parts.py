"""Splits a decision to fit etcd's limits: the decision stays one step, its notes follow. Pure.

Notes, such as a failure charged to a node, end with a lease, which etcd has to grant first. A recovery does not wait
for that. Also, etcd refuses a transaction with more than 128 comparisons or changes. A decision changes a few keys,
but notes grow with the cluster. A leader that dies in between loses notes, never a decision.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Final

from headway.daemon.coordination.commands import Transaction

MAX_OPERATIONS: Final = 128
"""Maximum number of changes, and of comparisons, of one transaction: etcd's `--max-txn-ops`."""


def parts(decided: Transaction) -> tuple[Transaction, ...]:
    """Return the decision, then its keys under leases. The shell compares its own key in each part."""
    num_changes = len(decided.puts) + len(decided.deletes)
    assert num_changes <= MAX_OPERATIONS, "a decision changes a limited number of keys: see MAX_SWEPT and MAX_TRIMMED"
    return replace(decided, leased={}), *_notes(decided)


def _notes(decided: Transaction) -> Iterator[Transaction]:
    leased = iter(decided.leased.items())
    while batch := dict(islice(leased, MAX_OPERATIONS)):
        yield Transaction(job=decided.job, reason=decided.reason, leased=batch)
