"""Places records whose keys have several parts in a job's view. Pure."""

from typing import TYPE_CHECKING, Any

from headway.daemon.view.record_places import RecordPlace

if TYPE_CHECKING:
    from headway.daemon.view.job_view import JobView


def fold_nested(job: "JobView", place: RecordPlace, record: Any) -> None:
    """Apply a record, or its deletion, for a key with several parts."""
    match place.leaf:
        case "workers":
            generation, position = place.numbers
            set_record(job.workers, (generation, position), record)
        case "goodput":
            generation, position = place.numbers
            set_record(job.goodput, (generation, position), record)
        case "state":
            timeline, boundary = place.numbers
            set_inner_record(job.state, (timeline, boundary), place.node, record)
        case "events":
            set_record(job.events, place.numbers[0], record)
        case "profile":
            set_record(job.profiles, (place.node, place.numbers[0]), record)
        case "reading":
            set_record(job.readings, place.node, record)


def set_record(records: dict[Any, Any], key: object, record: Any) -> None:
    """Apply a record or its deletion."""
    if record is None:
        records.pop(key, None)
    else:
        records[key] = record


def set_inner_record(records: dict[Any, dict[Any, Any]], outer: object, key: object, record: Any) -> None:
    """Apply a record or its deletion one level deeper; an empty level is removed."""
    if record is not None:
        records.setdefault(outer, {})[key] = record
    elif outer in records:
        records[outer].pop(key, None)
        if not records[outer]:
            del records[outer]
