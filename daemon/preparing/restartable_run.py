"""One run of a preparation: begun anew, or where the journal of an earlier one ends; and it writes the journal."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from headway.daemon.preparing.bad_records import BadRecords
from headway.daemon.preparing.batch_encoding import Position
from headway.daemon.preparing.destination import Destination
from headway.daemon.preparing.unfinished import Left, Unfinished
from headway.stages.data.shard_writer import DataForm, ShardWriter
from headway.stages.errors import DataError

SAVE_EVERY_S: Final = 10.0
"""Seconds of work that a stop costs at most, and those of writing the journal."""
SAVING_SHARE: Final = 0.05
"""Most of the time that journals may take: rows that wait may be many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What every run of a preparation makes anew."""

    form: DataForm
    padding: int
    max_tokens: int
    max_bad: int


class RestartableRun:
    """What is written so far, and up to where in the sources."""

    def __init__(self, place: Unfinished, options: RunOptions, warn: Callable[[str], None]) -> None:
        self.writer = ShardWriter(place.data, options.form)
        self.destination = Destination(self.writer, padding=options.padding, max_tokens=options.max_tokens)
        self.bad = BadRecords(options.max_bad, warn)
        self.noted: Counter[str] = Counter()
        """Of an earlier run too."""
        self.start = Position()
        self._place = place
        self._due_s = time.monotonic() + SAVE_EVERY_S

    @classmethod
    def begin(cls, place: Unfinished, options: RunOptions, warn: Callable[[str], None]) -> "RestartableRun":
        """Go on with what lies in a place, if it is of the same work and whole; otherwise empty the place."""
        left = place.left()
        if left is not None:
            found = cls(place, options, warn)
            try:
                found._resume(left)
            except DataError as error:
                found.writer.abandon()
                warn(f"{error}: what an earlier run left is damaged, so all starts afresh")
                place.start_afresh()
                return cls(place, options, warn)
            warn(f"goes on after {found.destination.num_taken:,} tokens of an earlier run")
            return found
        if place.start_afresh():
            warn("an earlier run ended early or had other arguments or inputs, so all starts afresh")
        return cls(place, options, warn)

    def save_if_due(self, position: Position) -> None:
        """Write the journal, now and then. position: everything before it is in the destination."""
        began_s = time.monotonic()
        if not self._place.can_go_on or began_s < self._due_s:
            return
        fields, waiting = self.destination.state()
        said = {
            "position": asdict(position),
            "num_bad": self.bad.count,
            "bad_kinds": self.bad.kinds,
            "noted": self.noted,
            "destination": fields,
        }
        self._place.save(said, waiting)
        ended_s = time.monotonic()
        self._due_s = ended_s + max(SAVE_EVERY_S, (ended_s - began_s) / SAVING_SHARE)

    def _resume(self, left: Left) -> None:
        fields = left.fields["destination"]
        self._place.keep_only(set(_names(fields)))
        self.destination.resume(fields, left.waiting)
        self.bad.count = left.fields["num_bad"]
        self.bad.kinds = Counter(left.fields["bad_kinds"])
        self.noted = Counter(left.fields["noted"])
        self.start = Position(**left.fields["position"])


def _names(fields: dict[str, Any]) -> list[str]:
    """Return the files that a destination's state names."""
    written = [split["written"] for split in fields["splits"]]
    shards = [shard for each in written for shard in (*each["shards"], each["growing"]) if shard]
    return [name for shard in shards for name in (shard["file"], shard["flags"]) if name]
