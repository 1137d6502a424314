"""`headway data prepare`: text in files or in a Hugging Face data set becomes a folder of token shards."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from headway.daemon.data.text_sources import Source, library, open_sources
from headway.daemon.errors import ConfigError
from headway.stages.errors import DataError
from headway.stages.shard_writer import writing_shards
from headway.stages.tokens import ShardIndex, read_index

BYTES = "bytes"
TOKENIZER_NAME = "tokenizer.json"
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """Text to tokens."""

    vocab_size: int
    encode: Callable[[bytes], npt.NDArray[np.integer]]
    """From UTF-8. Raises UnicodeDecodeError where the tokenizer needs text."""
    end_of_text: int | None
    """Put after each document; None: the tokenizer has no such token."""
    file: Path | None = None
    """The tokenizer's own file; goes beside the shards."""


def prepare(
    sources: Sequence[str],
    out: Path,
    *,
    tokenizer: str = BYTES,
    field: str = "text",
    config: str | None = None,
    split: str = "train",
    max_tokens: int = 0,
    console: Console | None = None,
) -> ShardIndex:
    """Make the data folder `out` from sources in their order; it appears whole or not at all.

    A source is a text file, a `.jsonl` or `.parquet` file (`field` names the text's column), a folder (all its files,
    by name) or `hf:NAME`, a Hugging Face data set (with `config` and `split`). tokenizer: `bytes`, or a `tokenizers`
    JSON file. max_tokens ends early; 0 takes everything. console shows a progress bar.
    Raises ConfigError: a file or library is missing, a record has no such field, `out` exists.
    """
    if not sources:
        raise ConfigError("no source of text was named")
    encoder = read_encoder(tokenizer)
    opened = [source for name in sources for source in open_sources(name, field=field, config=config, split=split)]
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[tokens]:,} tokens"),
        TimeRemainingColumn(),
        console=console,
        disable=console is None,
    )
    try:
        with (
            progress,
            writing_shards(
                out,
                vocab_size=encoder.vocab_size,
                tokenizer=TOKENIZER_NAME if encoder.file else BYTES,
                provenance=", ".join(sources),
            ) as writer,
        ):
            if encoder.file:
                (writer.folder / TOKENIZER_NAME).write_bytes(encoder.file.read_bytes())
            sizes = [source.size for source in opened]
            task = progress.add_task("preparing", total=sum(sizes) if all(sizes) else None, tokens=0)
            for tokens, part in _token_stream(opened, encoder):
                writer.append(tokens[: max_tokens - writer.num_tokens] if max_tokens else tokens)
                progress.update(task, advance=part, tokens=writer.num_tokens)
                if max_tokens and writer.num_tokens >= max_tokens:
                    break
            if not writer.num_tokens:
                raise ConfigError("no text in it", ", ".join(sources))
    except DataError as error:
        raise ConfigError(error.reason, error.path) from error
    return read_index(out)


def read_encoder(tokenizer: str) -> Encoder:
    """`bytes`, or a `tokenizers` JSON file. Raises ConfigError when it is missing or not one."""
    if tokenizer == BYTES:
        return Encoder(vocab_size=256, encode=lambda piece: np.frombuffer(piece, dtype=np.uint8), end_of_text=0)
    file = Path(tokenizer)
    if not file.is_file():
        raise ConfigError("no such tokenizer: say bytes, or name a tokenizers JSON file", tokenizer)
    try:
        loaded = library("tokenizers").Tokenizer.from_file(tokenizer)
    except ConfigError:
        raise
    except Exception as error:  # the library raises nothing more exact
        raise ConfigError(f"is not a tokenizers JSON file: {error}", tokenizer) from error
    ends = [token for token in map(loaded.token_to_id, _END_OF_TEXT) if token is not None]
    return Encoder(
        vocab_size=loaded.get_vocab_size(),
        encode=lambda piece: np.array(loaded.encode(piece.decode(), add_special_tokens=False).ids, dtype=np.int64),
        end_of_text=ends[0] if ends else None,
        file=file,
    )


def _token_stream(sources: Sequence[Source], encoder: Encoder) -> Iterator[tuple[npt.NDArray[np.integer], float]]:
    """Tokens in order, each with the part of the sources' sizes that is done with it."""
    separator = np.array([] if encoder.end_of_text is None else [encoder.end_of_text], dtype=np.int64)
    for source in sources:
        for document, part in source.documents():
            try:
                for piece in document:
                    yield encoder.encode(piece), 0.0
            except UnicodeDecodeError as error:
                raise ConfigError("is not UTF-8 text", source.name) from error
            yield separator, part
