"""Reads and checks each key before it enters a cluster view. Pure.

Any content of etcd, from any writer, comes out as a record in its place or as one error with a reason.
"""

import math
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final

from headway.daemon.base.addresses import JOB_NAME_RULE, LOCAL_HOSTS, NODE_NAME_RULE, is_job_name, is_node_name
from headway.daemon.cluster.cluster_records import (
    IssuedRecord,
    LeaderRecord,
    NodeFailureRecord,
    RetiredRecord,
    RevokedRecord,
    SharesRecord,
    UsageRecord,
)
from headway.daemon.cluster.format import NewerFormatError, decode
from headway.daemon.cluster.keys import Keys
from headway.daemon.cluster.measurements import (
    GoodputRecord,
    ProbeRecord,
    ProfileRecord,
    ProgressRecord,
    ReachRecord,
    ReadingRecord,
    is_possible,
    is_speed,
)
from headway.daemon.cluster.records import (
    CheckpointRecord,
    DesiredRecord,
    EventRecord,
    NodeRecord,
    PhaseRecord,
    PlanRecord,
    SpecRecord,
    StateRecord,
    StopRecord,
    WorkerRecord,
)
from headway.daemon.decide.usage import why_no_shares, why_no_usage
from headway.daemon.jobs.rules import MAX_TEXT

MOST_SECONDS: Final = 1e9
"""Maximum of a measured time: 30 years."""

LEAST_RATE: Final = 1e-6
MOST_RATE: Final = 1e15
"""Limits of tokens a second: a report of all jobs divides by those of each."""
MOST_BATCH: Final = 2**31 - 1
MOST_GENERATION: Final = 2**30
"""Maximum generation that a node or a retired job may tell of. The job goes on above it, and its numbers have 31 bits.
"""

MAX_SENTENCE: Final = 8 * MAX_TEXT
"""Maximum length of what a node says of itself: plans and reasons of any job take it over, and etcd takes 1.5 MB."""
MAX_REASON: Final = 300
MAX_FACTS: Final = 20_000
"""Maximum number of facts of one node about the ports of all others."""

SINGLE: Final[dict[str, type[Any]]] = {
    "spec": SpecRecord,
    "desired": DesiredRecord,
    "phase": PhaseRecord,
    "plan": PlanRecord,
    "next": PlanRecord,
    "stop": StopRecord,
    "checkpoint": CheckpointRecord,
    "progress": ProgressRecord,
}
"""Keys of a job that hold one record."""
NESTED: Final[dict[str, type[Any]]] = {
    "workers": WorkerRecord,
    "state": StateRecord,
    "events": EventRecord,
    "goodput": GoodputRecord,
    "profile": ProfileRecord,
    "reading": ReadingRecord,
}
"""Keys of a job that have several parts."""
OF_NODES: Final[dict[str, type[Any]]] = {Keys.NODES: NodeRecord, Keys.PROBES: ProbeRecord, Keys.REACH: ReachRecord}
"""Keys with a node's name, by prefix."""
OF_CERTIFICATES: Final[dict[str, type[Any]]] = {Keys.ISSUED: IssuedRecord, Keys.REVOKED: RevokedRecord}
"""Keys with the name in a certificate, in small letters, by prefix."""
DECISIVE: Final = frozenset(SINGLE) - {"progress"}
"""Keys without which the coordinator cannot decide about a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A key that is set aside."""

    reason: str
    is_newer: bool = False
    """True if a newer release wrote the key: then it is left alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordPlace:
    """The place of a record in a view."""

    folder: str
    """`leader`, `placement`, `shares`, `usage`, `nodes`, `probes`, `reach`, `failures`, `jobs`, `retired`,
    `invitations`, `issued` or `revoked`.
    """
    name: str = ""
    """Name of the node or of the job."""
    leaf: str = ""
    """Part of a job: `spec`, `workers`, …"""
    numbers: tuple[int, ...] = ()
    node: str = ""
    kind: type[Any] | None = None
    """Class of the record; None: the content does not matter."""


def place_of(key: str) -> RecordPlace:
    """Return the place of a key's record. Raises ValueError for a key that no daemon writes, in any spelling."""
    if key == Keys.LEADER:
        return RecordPlace(folder="leader", kind=LeaderRecord)
    if key == Keys.PLACEMENT:
        return RecordPlace(folder="placement")
    if key == Keys.SHARES:
        return RecordPlace(folder="shares", kind=SharesRecord)
    if key == Keys.USAGE:
        return RecordPlace(folder="usage", kind=UsageRecord)
    for prefix, kind in OF_NODES.items():
        if key.startswith(prefix):
            name = _node(key.removeprefix(prefix))
            return RecordPlace(folder=_folder(prefix), name=name, kind=kind)
    if key.startswith(Keys.INVITATIONS):
        return RecordPlace(folder="invitations")  # for daemons with the authority alone
    for prefix, kind in OF_CERTIFICATES.items():
        if key.startswith(prefix):
            name = _node(key.removeprefix(prefix))
            _written_so(key, prefix + name.casefold())
            return RecordPlace(folder=_folder(prefix), name=name, kind=kind)
    if key.startswith(Keys.FAILURES):
        node, _, number = key.removeprefix(Keys.FAILURES).partition("/")
        _written_so(key, Keys.failure(_node(node), int(number)))
        return RecordPlace(folder="failures", name=node, numbers=(int(number),), kind=NodeFailureRecord)
    if key.startswith(Keys.RETIRED):
        name = key.removeprefix(Keys.RETIRED)
        if not is_job_name(name):
            raise ValueError(f"no job has such a key: a name is {JOB_NAME_RULE}")
        return RecordPlace(folder="retired", name=name, kind=RetiredRecord)
    if key.startswith(Keys.JOBS):
        return _place_in_job(key)
    raise ValueError("unknown key")


def _place_in_job(key: str) -> RecordPlace:
    name, _, leaf = key.removeprefix(Keys.JOBS).partition("/")
    if not is_job_name(name) or not leaf:
        raise ValueError(f"no job has such a key: a name is {JOB_NAME_RULE}")
    head, _, rest = leaf.partition("/")
    if head in SINGLE and leaf == head:
        return RecordPlace(folder="jobs", name=name, leaf=head, kind=SINGLE[head])
    if head not in NESTED:
        raise ValueError("unknown key of a job")
    parts, node, numbers, spelled = rest.split("/"), "", tuple[int, ...](), ""
    match head, parts:
        case "workers" | "goodput", [generation, position]:
            numbers = (int(generation), int(position))
            spelled = (Keys.worker if head == "workers" else Keys.goodput)(name, *numbers)
        case "state", [timeline, boundary, holder]:
            numbers, node = (int(timeline), int(boundary)), _node(holder)
            spelled = Keys.state(name, *numbers, node)
        case "events", [number]:
            numbers = (int(number),)
            spelled = Keys.event(name, *numbers)
        case "profile", [holder, device]:
            numbers, node = (int(device),), _node(holder)
            spelled = Keys.profile(name, node, *numbers)
        case "reading", [reader]:
            node = _node(reader)
            spelled = Keys.reading(name, node)
        case _:
            raise ValueError("unknown key of a job")
    _written_so(key, spelled)
    return RecordPlace(folder="jobs", name=name, leaf=head, numbers=numbers, node=node, kind=NESTED[head])


def read_record(place: RecordPlace, value: bytes) -> Any:
    """Return the record of a place. Raises NewerFormatError, and ValueError for an invalid record."""
    if place.kind is None:
        return None
    record = decode(value, place.kind)
    if isinstance(record, NodeRecord):
        record = _with_short_sentences(record)
        _check_node(record, place.name)
    elif isinstance(record, IssuedRecord | RevokedRecord):
        if record.name.casefold() != place.name or not is_node_name(record.name):
            raise ValueError(f"it is of {record.name[:60]!r}")
        if place.name in LOCAL_HOSTS:
            raise ValueError("every certificate bears this name, so all of them would be meant")
    elif isinstance(record, ProbeRecord):
        for peer, probe in record.peers.items():
            is_sound = probe.round_trip_s >= 0 and probe.bytes_per_s > 0 and 0 <= probe.loss < 1
            if not is_sound or not math.isfinite(probe.bytes_per_s + probe.round_trip_s):
                raise ValueError(f"its measurement of {peer!r} is impossible")
    elif isinstance(record, ReachRecord):
        _check_reach(record)
    elif isinstance(record, RetiredRecord):
        is_number = 0 <= record.generation <= MOST_GENERATION
        if not is_number or len(record.checkpoint) > MAX_TEXT or not math.isfinite(record.since):
            raise ValueError("its generation, checkpoint or time is impossible")
    elif isinstance(record, SharesRecord | UsageRecord):
        if why := why_no_shares(record) if isinstance(record, SharesRecord) else why_no_usage(record):
            raise ValueError(why)
    elif isinstance(record, ProfileRecord):
        _check_profile(record)
    elif isinstance(record, ProgressRecord):
        _check_progress(record)
    elif isinstance(record, PhaseRecord) and not all(map(is_possible, record.shortages)):
        # A shortage only advises plans. Without the phase the job would be set aside until someone repairs the record.
        return replace(record, shortages=tuple(filter(is_possible, record.shortages)))
    return record


def unreadable(error: Exception) -> Unreadable:
    """Return the entry for a key whose record cannot be used."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return Unreadable(reason=reason[:MAX_REASON], is_newer=isinstance(error, NewerFormatError))


def _check_profile(record: ProfileRecord) -> None:
    parts = [(times.forward_s, times.backward_s, times.update_s) for times in record.layers.values()]
    seconds = [record.replan_s, *(value for times in parts for value in times)]
    # Plans divide by a layer's time, and add up those of all layers.
    if not all(0 <= value <= MOST_SECONDS for value in seconds) or any(sum(times[:2]) == 0 for times in parts):
        raise ValueError("its times are impossible")
    if not 1 <= record.demand < math.inf or record.peak_bytes < 0:
        raise ValueError("its memory is impossible")


def _check_progress(record: ProgressRecord) -> None:
    is_rate = record.tokens_per_second == 0 or LEAST_RATE <= record.tokens_per_second <= MOST_RATE
    if not is_rate or not -1 <= record.batch <= MOST_BATCH:
        raise ValueError("its batch or its tokens per second are impossible")


def _with_short_sentences(record: NodeRecord) -> NodeRecord:
    """Cut what a node says to people: an earlier release wrote texts of any length, and its node counts."""
    said = (record.stays_out, record.worker_trouble, *record.ailments.values())
    if max(map(len, said)) <= MAX_SENTENCE:
        return record
    return replace(
        record,
        stays_out=record.stays_out[:MAX_SENTENCE],
        worker_trouble=record.worker_trouble[:MAX_SENTENCE],
        ailments={activity: reason[:MAX_SENTENCE] for activity, reason in record.ailments.items()},
    )


def _check_node(record: NodeRecord, name: str) -> None:
    if record.name != name:
        raise ValueError(f"names itself node {record.name[:60]!r}")
    for position, device in enumerate(record.devices):
        if device.index != position:
            raise ValueError(f"its device {position} has index {device.index}")
        rates = (device.speed, *filter(None, (device.bfloat16_speed, device.memory_gb_s, device.num_cores)))
        if not all(map(is_speed, rates)):
            raise ValueError(f"its device {position} has an impossible speed or memory")
        if device.memory_bytes < 0 or device.reserve_bytes < 0:
            raise ValueError(f"its device {position} has an impossible speed or memory")
    texts = (record.address, record.host, record.site, *(worker.address for worker in record.workers))
    if max(map(len, texts)) > MAX_TEXT:
        raise ValueError(f"its addresses, host and site have at most {MAX_TEXT} characters each")
    own = (record.incarnation, record.arithmetic_class, record.worker_ports, record.stays_out, record.worker_trouble)
    of_devices = (
        (device.kind, device.model, device.arithmetic_class, device.capability, device.flash3)
        for device in record.devices
    )
    of_workers = (worker.incarnation for worker in record.workers)
    if max(map(len, (*own, *chain(*of_devices), *of_workers, *chain(*record.ailments.items())))) > MAX_SENTENCE:
        raise ValueError(f"a text of it has more than {MAX_SENTENCE} characters")
    if not all(0 <= generation <= MOST_GENERATION for generation in record.generations.values()):
        raise ValueError("it has seen an impossible generation")
    listening = {worker.device_index for worker in record.workers}
    if len(listening) < len(record.workers) or not listening <= set(range(len(record.devices))):
        raise ValueError("each device has one worker at most, and each worker a device")


def _check_reach(record: ReachRecord) -> None:
    if len(record.facts) > MAX_FACTS:
        raise ValueError(f"it has {len(record.facts)} facts; at most {MAX_FACTS} are read")
    if any(len(fact.reason) > MAX_TEXT or len(fact.address) > MAX_TEXT for fact in record.facts):
        raise ValueError(f"an address or reason has more than {MAX_TEXT} characters")


def _folder(prefix: str) -> str:
    return prefix.rstrip("/").rpartition("/")[2]


def _node(name: str) -> str:
    if not is_node_name(name):
        raise ValueError(f"no node has such a key: a name is {NODE_NAME_RULE}")
    return name


def _written_so(key: str, spelled: str) -> None:
    """Check the key's spelling, because two keys of one place would overwrite each other."""
    if key != spelled:
        raise ValueError(f"daemons write this key as {spelled}")
