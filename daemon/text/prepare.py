"""`headway data prepare`: turns text in files or in a Hugging Face data set into a folder of token shards."""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from headway.daemon.base.errors import ConfigError
from headway.daemon.base.terminal import counted, printable_name
from headway.daemon.text.batch_encoding import Noted, Position, Read, encoded_pieces
from headway.daemon.text.data_tokenizer import BYTES, TOKENIZER_CONFIG_NAME, TOKENIZER_NAME
from headway.daemon.text.destination import Destination
from headway.daemon.text.documents import BadRecord
from headway.daemon.text.encoder import Encoder, read_encoder
from headway.daemon.text.preparation import Preparation
from headway.daemon.text.records import Field
from headway.daemon.text.summary import BadRecords, Prepared
from headway.daemon.text.text_sources import Source, open_sources
from headway.daemon.text.unfinished import Unfinished, unfinished
from headway.stages.data.shard_index import read_index
from headway.stages.data.shard_writer import DataForm, ShardWriter, publish
from headway.stages.errors import DataError

# One run of a preparation: begun anew, or where the journal of an earlier one ends; and it writes the journal.

SAVE_EVERY_S: Final = 10.0
"""Seconds of work that a stop costs at most, and those of writing the journal."""
SAVING_SHARE: Final = 0.05
"""Most of the time that journals may take: rows that wait may be many."""


class RestartableRun:
    """What is written so far, and up to where in the sources."""

    def __init__(self, place: Unfinished, encoder: Encoder, options: Preparation, warn: Callable[[str], None]) -> None:
        form = DataForm(
            vocab_size=encoder.vocab_size,
            has_flags=options.has_flags,
            row_tokens=options.row_tokens,
            holds_pairs=options.pairs,
        )
        self.writer = ShardWriter(place.data, form)
        self.destination = Destination(self.writer, padding=encoder.padding, max_tokens=options.max_tokens)
        self.bad = BadRecords(options.max_bad, warn)
        self.noted: Counter[str] = Counter()
        """Of an earlier run too."""
        self.start = Position()
        self._place = place
        self._due_s = time.monotonic() + SAVE_EVERY_S

    @classmethod
    def begin(
        cls, place: Unfinished, encoder: Encoder, options: Preparation, warn: Callable[[str], None]
    ) -> "RestartableRun":
        """Go on with what lies in a place, if it is of the same work and whole; otherwise empty the place."""
        left = place.left()
        if left is not None:
            found = cls(place, encoder, options, warn)
            try:
                found._resume(left)
            except DataError as error:
                found.writer.abandon()
                warn(f"{error}: what an earlier run left is damaged, so all starts afresh")
                place.start_afresh()
                return cls(place, encoder, options, warn)
            warn(f"goes on after {found.destination.num_taken:,} tokens of an earlier run")
            return found
        if place.start_afresh():
            warn("an earlier run ended early or had other arguments or inputs, so all starts afresh")
        return cls(place, encoder, options, warn)

    def save_if_due(self, position: Position) -> None:
        """Write the journal, now and then. position: everything before it is in the destination."""
        began_s = time.monotonic()
        if not self._place.can_go_on or began_s < self._due_s:
            return
        self._place.save((position, self.bad.count, self.bad.kinds, self.noted, self.destination.state()))
        ended_s = time.monotonic()
        self._due_s = ended_s + max(SAVE_EVERY_S, (ended_s - began_s) / SAVING_SHARE)

    def _resume(self, saved: Any) -> None:
        self.start, self.bad.count, self.bad.kinds, self.noted, written = saved
        _, splits = written
        shards = [shard for _, _, state in splits for shard in (*state.shards, state.growing) if shard]
        self._place.keep_only({name for shard in shards for name in (shard.file, shard.flags) if name})
        self.destination.resume(written)


# Names the work of a preparation: two runs of one name write the same bytes, so one can go on with the other's.

_LIBRARIES: Final = ("headway", "tokenizers", "jinja2", "pyarrow")
"""Another release of these may read or encode in another way."""


RULES: Final = 13
"""Version of the rules by which texts and conversations become tokens: it rises with each change of a token."""


def name_of_work(sources: Sequence[Source], names: Sequence[str], encoder: Encoder, options: Preparation) -> str | None:
    """Return SHA-256 over options, tokenizer and inputs; None: a source could change without a trace.

    names: of the sources as they were given. Raises OSError when a source is not there any more.
    """
    identities = [source.identity for source in sources]
    if None in identities:
        return None
    described = {
        "rules": RULES,
        "options": asdict(options),
        "names": list(names),
        "sources": identities,
        "tokenizer": hashlib.sha256(encoder.file.read_bytes()).hexdigest() if encoder.file else "",
        "tokenizer_config": encoder.config,
        "end_of_text": encoder.end_of_text,
        "libraries": {name: _version(name) for name in _LIBRARIES},
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def prepare(
    sources: Sequence[str],
    out: Path,
    options: Preparation | None = None,
    *,
    warn: Callable[[str], None] = lambda _text: None,
    console: Console | None = None,
) -> Prepared:
    """Make the data folder `out` from sources in their order; it appears complete or not at all.

    A run that is stopped leaves a folder beside `out`, and a run of the same work goes on from there, to the same
    bytes.

    A source is a file of text or of records, a folder (all its files, by name; of a saved `DatasetDict` the split), a
    pattern of names, or `hf:NAME`, a Hugging Face data set. warn receives doubts about the input. console
    shows a progress bar. Raises ConfigError: a file or library is missing or no text, a record has no such field,
    `out` exists.
    """
    options = options or Preparation(max_bad=0)
    if not sources:
        raise ConfigError("no source of text was named")
    encoder = _encoder(options, warn)
    try:
        opened = [source for name in sources for source in _opened(name, options, warn)]
        work = name_of_work(opened, sources, encoder, options)
        with unfinished(out, work, warn) as place:
            run = RestartableRun.begin(place, encoder, options, warn)
            try:
                _fill(run, opened, encoder, options, console)
                train, validation = run.destination.finish()
                is_short = options.pairs and train.left_out + validation.left_out > 0
                _check(run, ", ".join(sources), options, rows_are_short=is_short)
                if encoder.file:
                    (place.data / TOKENIZER_NAME).write_bytes(encoder.file.read_bytes())
                    (place.data / TOKENIZER_CONFIG_NAME).write_text(encoder.config + "\n", encoding="utf-8")
                provenance = printable_name(", ".join([*sources, *([encoder.told] if encoder.told else [])]))
                run.writer.close(tokenizer=TOKENIZER_NAME if encoder.file else BYTES, provenance=provenance)
            finally:
                run.writer.abandon()
            publish(place.data, out)
    except DataError as error:
        raise ConfigError(error.reason, error.path) from error
    except OSError as error:  # of a source, which it names, or of the shards
        raise ConfigError(
            f"cannot be read or written: {error.strerror or error}", error.filename or str(out)
        ) from error
    return Prepared(
        index=read_index(out),
        train=train,
        validation=validation,
        begin_of_text="" if options.has_chats else encoder.begin_name,
        num_bad=run.bad.count,
        bad_kinds=run.bad.kinds,
        noted=run.noted,
    )


def _opened(name: str, options: Preparation, warn: Callable[[str], None]) -> list[Source]:
    found = open_sources(
        name,
        field=Field(options.field, is_chat=options.has_chats, is_pair=options.pairs),
        config=options.config,
        split=options.split,
        is_binary=options.binary,
        tell=warn,
    )
    for source in found:
        if source.path and not source.size:
            warn(f"{source.name}: is empty")
    return found


def _encoder(options: Preparation, warn: Callable[[str], None]) -> Encoder:
    encoder = read_encoder(options)
    if options.has_chats and encoder.chats is None:
        raise ConfigError(
            "has no chat template; name the folder of a model that has one with --tokenizer", options.tokenizer
        )
    if encoder.end_of_text is None and not options.has_chats:
        what = "names no end-of-text token, so documents run into each other; name it with --end-of-text"
        warn(f"{options.tokenizer}: {what}")
    return encoder


def _fill(
    run: RestartableRun, sources: Sequence[Source], encoder: Encoder, options: Preparation, console: Console | None
) -> None:
    """Write all documents, or as many as are wanted."""
    sizes = [source.size for source in sources]
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        *((DownloadColumn(), TransferSpeedColumn()) if all(sizes) else ()),
        TextColumn("{task.fields[tokens]:,} tokens"),
        TimeRemainingColumn(),
        console=console,
        disable=console is None,
    )
    with progress:
        task = progress.add_task("preparing", total=sum(sizes) if all(sizes) else None, tokens=0)
        for item in encoded_pieces(sources, encoder, options, run.start):
            if isinstance(item, BadRecord):
                run.bad.leave_out(item)
            elif isinstance(item, Read):
                progress.update(task, advance=item.size, tokens=run.destination.num_taken)
            elif isinstance(item, Noted):
                run.noted += item.counts
            elif isinstance(item, Position):
                run.save_if_due(item)
            else:
                run.destination.add(item)
                if run.destination.is_full:
                    return


def _check(run: RestartableRun, sources: str, options: Preparation, *, rows_are_short: bool) -> None:
    """Raise ConfigError if a split is empty."""
    writer = run.writer
    if not writer.num_tokens and not writer.validation.num_tokens:
        what = "nothing to train on in it" if options.pack else "no text in it"
        if run.bad.count:
            what = f"{what} but {counted(run.bad.count, 'record')} that cannot be used"
        hint = "; a pair that is longer than a row is left out: name a larger --pack" if rows_are_short else ""
        raise ConfigError(f"{what}{hint}", sources)
    empty = "training" if not writer.num_tokens else "validation"
    if options.validation and not (writer.num_tokens and writer.validation.num_tokens):
        what = f"leaves the {empty} split empty: whole documents are held out, and a text file is one document"
        raise ConfigError(f"{what}; name more documents, or another share or --seed", "--validation")
