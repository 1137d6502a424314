"""etcd as a value: keys with revisions and owners, transactions, and the history that watches read."""

from dataclasses import dataclass, field

MAX_OPERATIONS = 128
"""etcd's own default of `--max-txn-ops`."""


@dataclass(frozen=True, slots=True)
class Change:
    """One key in one revision."""

    key: str
    value: bytes | None
    revision: int
    create_revision: int


@dataclass
class Store:
    """etcd: keys with revisions and owners, transactions, and the history that watches read."""

    values: dict[str, bytes] = field(default_factory=dict)
    revisions: dict[str, tuple[int, int]] = field(default_factory=dict)
    """key: (create revision, revision of the last change)"""
    owners: dict[str, str] = field(default_factory=dict)
    """key: the lease it lives by"""
    history: list[Change] = field(default_factory=list)
    revision: int = 0

    def transact(
        self,
        compare: dict[str, int],
        puts: dict[str, bytes],
        deletes: tuple[str, ...] = (),
        *,
        lease: str = "",
    ) -> bool:
        """All or nothing, as etcd does it."""
        assert max(len(compare), len(puts) + len(deletes)) <= MAX_OPERATIONS, "etcd refuses so many operations"
        if any(self.revisions.get(key, (0, 0))[1] != revision for key, revision in compare.items()):
            return False
        assert not set(puts) & set(deletes), "etcd refuses a transaction that writes a key twice"
        self.revision += 1
        for key, value in puts.items():
            created = self.revisions.get(key, (self.revision, 0))[0]
            self.values[key], self.revisions[key] = value, (created, self.revision)
            if lease:
                self.owners[key] = lease
            self.history.append(Change(key, value, self.revision, created))
        for key in deletes:
            for name in [name for name in self.values if name.startswith(key)] if key.endswith("/") else [key]:
                self._drop(name)
        return True

    def backup(self) -> "Store":
        """Return the content of a snapshot."""
        return Store(dict(self.values), dict(self.revisions), dict(self.owners), revision=self.revision)

    def restore(self, backup: "Store") -> None:
        """Be as it was then; whoever watched must list again."""
        self.values, self.revisions = dict(backup.values), dict(backup.revisions)
        self.owners, self.revision = dict(backup.owners), backup.revision
        self.history = [
            Change(key, value, self.revisions[key][1], self.revisions[key][0]) for key, value in self.values.items()
        ]

    def revoke(self, lease: str) -> None:
        """Delete everything that lives by a lease."""
        self.revision += 1
        for key in [key for key, owner in self.owners.items() if owner == lease]:
            self._drop(key)

    def _drop(self, key: str) -> None:
        if key in self.values:
            del self.values[key], self.revisions[key]
            self.owners.pop(key, None)
            self.history.append(Change(key, None, self.revision, 0))
