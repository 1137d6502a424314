"""Schedules faults: a pure function of a seed and a few options, so that a failing run can be repeated.

This module does not know the cluster. A fault names its target by an ordinal; the injector applies it to the list of
targets that exist at that time.
"""

import hashlib
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from headway.daemon.base.errors import ConfigError


class FaultKind(StrEnum):
    """The faults of the command. docs/robustness.md has the catalogue."""

    KILL = "kill"  # SIGKILL to a worker
    DAEMON_KILL = "daemon-kill"  # SIGKILL to a daemon; its workers die with it
    LEADER_KILL = "leader-kill"  # SIGKILL to the leading daemon
    WORKER_PAUSE = "worker-pause"  # SIGSTOP to a worker, later SIGCONT
    PAUSE = "pause"  # SIGSTOP to a node's daemon and all its workers, later SIGCONT: the node looks cut off
    FLAP = "flap"  # a node paused and continued several times in a row
    SLOW = "slow"  # a worker that is stopped for most of each tenth of a second
    CORRUPT = "corrupt"  # one bit of a stored layer file flipped
    TRUNCATE = "truncate"  # a stored layer file cut short
    ETCD_STOP = "etcd-stop"  # SIGSTOP to etcd, later SIGCONT
    ETCD_KILL = "etcd-kill"  # SIGKILL to etcd, which its supervisor restarts
    LEASE_LOSS = "lease-loss"  # a healthy node's lease revoked
    LEADER_LOSS = "leader-loss"  # the leader's lease revoked
    DRAIN = "drain"  # a node is told to leave


REMOTE: Final = (FaultKind.DRAIN, FaultKind.LEADER_LOSS, FaultKind.LEASE_LOSS)
"""Faults that need only etcd, so they work on any cluster."""
DEFAULT_KINDS: Final = (FaultKind.KILL, FaultKind.DAEMON_KILL, FaultKind.PAUSE, FaultKind.SLOW, FaultKind.CORRUPT)
SHORTEST_S: Final = 0.2
FIRST_AFTER_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One scheduled fault."""

    number: int
    at_s: float
    """Seconds since the beginning."""
    kind: str
    """A FaultKind, or one of the soak's own."""
    ordinal: int
    """Ordinal of the target, modulo the number of targets that exist."""
    seconds: float
    """Duration, if the fault lasts."""
    share: float
    """Number in [0, 1) that selects the damaged place in a file."""


@dataclass(slots=True, kw_only=True)
class Blow:
    """A fault that was injected, and its result. Times are seconds since the beginning."""

    number: int
    kind: str
    target: str
    at_s: float
    until_s: float | None = None
    """Time at which it ended or was undone; None: it lasts."""
    takes_worker: bool = False
    """True if the fault ends a worker of the plan. Then progress of the old generation proves nothing."""
    generation: int = 0
    """Generation of the last progress seen before it."""
    batch: int = -1
    recovered_s: float | None = None
    new_generation: int | None = None
    """New generation; None: the generation did not change."""
    recomputed: int = 0
    """Batches that had begun before the fault and were recomputed; counted for the first fault of a plan."""

    @property
    def recovery_s(self) -> float | None:
        """Return the seconds from the fault to the first progress after it."""
        return None if self.recovered_s is None else self.recovered_s - self.at_s


def fault_schedule(
    *, seed: int, kinds: Sequence[str], rate_per_minute: float, duration_s: float, longest_s: float
) -> tuple[Strike, ...]:
    """Return the strikes in order of time: a Poisson process of this rate, with each kind drawn evenly from `kinds`.

    longest_s: maximum duration of a fault that lasts; durations are drawn evenly in their logarithm from SHORTEST_S on,
    so that some are shorter and some longer than a lease.
    """
    assert kinds, "names no kind of fault"
    assert rate_per_minute > 0, f"a rate of {rate_per_minute}"
    draws = _draws(seed)
    strikes: list[Strike] = []
    at_s = FIRST_AFTER_S
    while True:
        at_s += -math.log(1.0 - next(draws)) * 60.0 / rate_per_minute
        kind = kinds[int(next(draws) * len(kinds))]
        ordinal = int(next(draws) * 2**32)
        seconds = SHORTEST_S * (max(longest_s, SHORTEST_S) / SHORTEST_S) ** next(draws)
        share = next(draws)
        if at_s >= duration_s:
            return tuple(strikes)
        strikes.append(
            Strike(
                number=len(strikes) + 1,
                at_s=round(at_s, 3),
                kind=kind,
                ordinal=ordinal,
                seconds=round(seconds, 3),
                share=share,
            )
        )


def parse_kinds(text: str, known: Collection[str] = tuple(FaultKind)) -> tuple[str, ...]:
    """Return the kinds of `kill,pause`. Raises ConfigError with the names that exist."""
    kinds = tuple(filter(None, (part.strip() for part in text.split(","))))
    choices = f"choose from: {', '.join(dict.fromkeys(known))}"
    for name in kinds:
        if name not in known:
            raise ConfigError(f"no such fault; {choices}", f"--faults {name}")
    if not kinds:
        raise ConfigError(f"names no fault; {choices}", "--faults")
    return kinds


_UNITS: Final = {"s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def parse_rate(text: str) -> float:
    """Return 6.0 (a minute) for `6/min`. Raises ConfigError."""
    number, slash, unit = text.partition("/")
    seconds = _UNITS.get(unit.strip()) if slash else 60.0
    count = _number(number)
    if count is None or seconds is None or count <= 0:
        raise ConfigError("is not a rate; write for instance 6/min", f"--rate {text}")
    return count * 60.0 / seconds


def parse_duration(text: str) -> float:
    """Return seconds for `90s`, `2m`, `1h` or plain seconds. Raises ConfigError."""
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit, count = text[len(digits) :].strip() or "s", _number(digits)
    if count is None or count <= 0 or unit not in _UNITS:
        raise ConfigError("is not a duration; write for instance 90s or 2m", f"--for {text}")
    return count * _UNITS[unit]


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _draws(seed: int) -> Iterator[float]:
    """Yield numbers in [0, 1) that no release of Python changes."""
    count = 0
    while True:
        digest = hashlib.sha256(f"headway chaos {seed} {count}".encode()).digest()
        yield int.from_bytes(digest[:7], "big") / 2**56
        count += 1
