"""`headway data prepare`: turns text in files or in a Hugging Face data set into a folder of token shards."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from headway.daemon.data.data_tokenizer import BYTES, TOKENIZER_CONFIG_NAME, TOKENIZER_NAME
from headway.daemon.data.encoder import Encoder, read_encoder
from headway.daemon.data.text_sources import Source, open_sources
from headway.daemon.errors import ConfigError
from headway.stages.data.shard_index import ShardIndex, read_index
from headway.stages.data.shard_writer import writing_shards
from headway.stages.errors import DataError


def prepare(
    sources: Sequence[str],
    out: Path,
    *,
    tokenizer: str = BYTES,
    field: str = "text",
    config: str | None = None,
    split: str = "train",
    max_tokens: int = 0,
    end_of_text: str = "",
    warn: Callable[[str], None] = lambda _text: None,
    console: Console | None = None,
) -> ShardIndex:
    """Make the data folder `out` from sources in their order; it appears complete or not at all.

    A source is a text file, a `.jsonl`, `.parquet` or `.arrow` file (`field` names the text's column), a folder (all
    its files, by name; of a saved `DatasetDict` the `split`) or `hf:NAME`, a Hugging Face data set (with `config` and
    `split`). tokenizer: `bytes`, or a `tokenizers` JSON file, optionally with a tokenizer_config.json in its folder.
    end_of_text: the token after each document, instead of the tokenizer's own. max_tokens ends early; 0 takes
    everything. warn receives doubts about the input. console shows a progress bar. Raises ConfigError: a file or
    library is missing, a record has no such field, `out` exists.
    """
    if not sources:
        raise ConfigError("no source of text was named")
    encoder = read_encoder(tokenizer, end_of_text)
    if encoder.end_of_text is None:
        warn(f"{tokenizer}: names no end-of-text token, so documents run into each other; name it with --end-of-text")
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
                (writer.folder / TOKENIZER_CONFIG_NAME).write_text(encoder.config + "\n", encoding="utf-8")
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


def _token_stream(sources: Sequence[Source], encoder: Encoder) -> Iterator[tuple[npt.NDArray[np.integer], float]]:
    """Yield tokens in order, each with the share of the sources' sizes read so far."""
    separator = np.array([] if encoder.end_of_text is None else [encoder.end_of_text], dtype=np.int64)
    for source in sources:
        for document, part in source.documents():
            try:
                for piece in document:
                    yield encoder.encode(piece), 0.0
            except UnicodeDecodeError as error:
                raise ConfigError("is not UTF-8 text", source.name) from error
            yield separator, part
