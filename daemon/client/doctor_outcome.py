"""What came of dialling a port, and what to do next. Pure.

The side that dials tells one line (`daemon/net/reach_dial.py`, `stages/sockets/tls_sentences.py`). The outcome is
found by that line, so that daemons of other releases are understood too.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from headway.daemon.plan.paths import REMEDY
from headway.stages.sockets.tls_sentences import in_words

ENDED: Final = "it ends the connection during the handshake"
LEADERLESS: Final = "it answers, but has no leader: more than half of all members must be there"


class Outcome(StrEnum):
    """What came of it."""

    REACHED = "reached"
    RELAYED = "reached through a relay"
    REFUSED = "refused"
    SILENT = "timed out"
    NO_ROUTE = "no route"
    UNKNOWN_NAME = "unknown name"
    OTHER_AUTHORITY = "another authority"
    EXPIRED = "expired"
    EARLY = "not valid yet"
    REVOKED = "revoked"
    OTHER_NAME = "another name"
    OTHER_PROCESS = "another process"
    OTHER_RELEASE = "another release"
    OTHER_SERVICE = "another service"
    NOT_BEHIND_PORT = "not behind that port"
    ENDED = "ended in the handshake"
    HANGS = "hangs"
    NO_MAJORITY = "no majority"
    UNCLEAR = "unclear"


_MARKS: Final = (
    ("connection was refused", Outcome.REFUSED),
    ("no answer to a connection", Outcome.SILENT),
    ("no route to host", Outcome.NO_ROUTE),
    ("network is unreachable", Outcome.NO_ROUTE),
    ("name or service not known", Outcome.UNKNOWN_NAME),
    ("the name has no address", Outcome.UNKNOWN_NAME),
    ("name resolution", Outcome.UNKNOWN_NAME),
    ("no address associated", Outcome.UNKNOWN_NAME),
    ("its certificate has expired", Outcome.EXPIRED),
    ("which has expired by its clock", Outcome.EXPIRED),
    ("its certificate is not valid yet", Outcome.EARLY),
    ("its certificate is not signed by", Outcome.OTHER_AUTHORITY),
    ("it is of another authority", Outcome.OTHER_AUTHORITY),
    ("its certificate does not carry the expected name", Outcome.OTHER_NAME),
    ("is revoked", Outcome.REVOKED),
    ("what listens there", Outcome.OTHER_SERVICE),
    ("the server there is not etcd", Outcome.OTHER_SERVICE),
    ("no such process is behind that port", Outcome.NOT_BEHIND_PORT),
    ("answers there", Outcome.OTHER_PROCESS),
    ("another process listens here now", Outcome.OTHER_PROCESS),
    (ENDED, Outcome.ENDED),
    ("it takes connections, but does not answer", Outcome.HANGS),
    (LEADERLESS, Outcome.NO_MAJORITY),
    (" instead of ", Outcome.OTHER_RELEASE),  # protocol 13 instead of 14
)
"""Parts of lines, and their outcomes; the first that fits counts."""

_WORDS: Final = (
    ("Connection refused", "the connection was refused"),
    ("tcp handshaker shutdown", "no answer to a connection"),
    ("address lookup failed", "the name has no address here"),
    ("Network is unreachable", "network is unreachable"),
    ("No route to host", "no route to host"),
    ("Endpoint closing", "it takes connections, but does not answer"),
    ("Socket closed", ENDED),
    ("reset by peer", ENDED),
)
"""Parts of gRPC's texts about a connection that was not made, and their meanings."""

_JOIN_AGAIN: Final = "`headway invite NAME --again`, and join into another folder"
OF_NODES: Final[Mapping[Outcome, str]] = {
    Outcome.RELAYED: "a relay carries all that the two send each other: if a router can map a port to the node, "
    "`announce` names it, and no relay is needed",
    Outcome.REFUSED: "nothing listens there, or a firewall rejects it: see that its daemon runs, and correct its "
    "`listen`, `announce` or the router's mapping",
    Outcome.SILENT: "a firewall drops it, or the address is another machine's: open the port, or correct its "
    "`advertise_host` or `announce`; a node that nobody can dial needs `relay`",
    Outcome.NO_ROUTE: "the two share no network: start the VPN, or correct its `advertise_host` or `announce`",
    Outcome.UNKNOWN_NAME: "set its `advertise_host` or `announce` to an address, or make the name known there",
    Outcome.OTHER_AUTHORITY: f"one of the two is of another cluster: {_JOIN_AGAIN}",
    Outcome.EXPIRED: f"compare the clocks; if it has really ended: {_JOIN_AGAIN}",
    Outcome.EARLY: "set the clocks of both machines",
    Outcome.REVOKED: "`headway certs list` says who revoked it, and `headway certs restore NAME` undoes it",
    Outcome.OTHER_NAME: "another node has that address: correct the `advertise_host` or `announce` of the wrong one",
    Outcome.OTHER_PROCESS: "it has just started again, or another node has its address: try again in a minute",
    Outcome.OTHER_RELEASE: "nothing is closed: upgrade the one with the lower protocol, and both compute together",
    Outcome.OTHER_SERVICE: "correct the node's `listen`, `announce` or the router's mapping",
    Outcome.NOT_BEHIND_PORT: "it has lost the relay there, or is starting: `headway nodes` shows where it is now",
    Outcome.ENDED: "it takes no certificate of this authority or at this time, or its daemon is just ending: compare "
    "ca.pem and the clocks, and see its log",
    Outcome.HANGS: "its process hangs, or is very busy: see its log, and start it again",
    Outcome.UNCLEAR: REMEDY,
}
"""What to do next about a node."""

OF_ETCD: Final[Mapping[Outcome, str]] = {
    Outcome.REFUSED: "nothing listens there: start etcd, or correct --etcd",
    Outcome.SILENT: "a firewall drops it, or the machine is off: open etcd's port to this machine, or correct --etcd",
    Outcome.NO_ROUTE: "no network leads there: start the VPN, or correct --etcd",
    Outcome.UNKNOWN_NAME: "name an address in --etcd, or make the name known here",
    Outcome.OTHER_AUTHORITY: "name that cluster's folder with --certs",
    Outcome.EXPIRED: "set this machine's clock, or give etcd another certificate with `headway certs`",
    Outcome.EARLY: "set the clocks of both machines",
    Outcome.OTHER_NAME: "give etcd a certificate with the host of --etcd: `headway certs ca etcd=HOST`",
    Outcome.OTHER_SERVICE: "name etcd's own port with --etcd",
    Outcome.ENDED: "it takes no certificate of this authority or at this time: name the right folder with --certs, and "
    "compare the clocks",
    Outcome.HANGS: "see etcd's log: it may have lost its majority, or its disk may be full",
    Outcome.NO_MAJORITY: "start the other members; if they are lost for good, follow `Lost members` in "
    "docs/deployment.md",
    Outcome.UNCLEAR: "see etcd's log; without --etcd, `headway up` makes a cluster here",
}
"""What to do next about etcd."""


def outcome_of(reason: str, address: str = "") -> Outcome:
    """Return the outcome that a line tells. An empty line is an answer, at an address that may be behind a relay."""
    if not reason:
        return Outcome.RELAYED if "~" in address.partition("/")[2] else Outcome.REACHED
    found = plain(reason).casefold()
    return next((outcome for mark, outcome in _MARKS if mark.casefold() in found), Outcome.UNCLEAR)


def plain(reason: str) -> str:
    """Return a line of the side that dials in words: it may be gRPC's own."""
    line = in_words(reason)
    is_of_grpc = any(mark in line for mark in ("failed to connect", "last error: ", "errors resolving"))
    return next((words for mark, words in _WORDS if is_of_grpc and mark in line), line)


def advice_on(outcomes: Iterable[Outcome], advice: Mapping[Outcome, str] = OF_NODES) -> str:
    """Return what to do next, once for each outcome."""
    return "; ".join(dict.fromkeys(found for each in outcomes if (found := advice.get(each, ""))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check and, if something is wrong, the remedy."""

    what: str
    is_fine: bool
    found: str
    advice: str = ""
    """The remedy; in a good finding, a remark."""
    outcomes: tuple[str, ...] = ()
    """What came of each dialled port, as `outcome.py` names it."""
