"""`headway data prepare`: turns text in files or in a Hugging Face data set into a folder of token shards."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from headway.daemon.data.data_tokenizer import BYTES, TOKENIZER_CONFIG_NAME, TOKENIZER_NAME
from headway.daemon.data.documents import Conversation, Document, Field
from headway.daemon.data.encoder import Encoder, Tokens, read_encoder
from headway.daemon.data.text_sources import Source, open_sources
from headway.daemon.errors import ConfigError
from headway.stages.data.shard_index import BEGINS_DOCUMENT, IS_TARGET, ShardIndex, read_index
from headway.stages.data.shard_writer import writing_shards
from headway.stages.errors import DataError

Flags = npt.NDArray[np.uint8]


def prepare(
    sources: Sequence[str],
    out: Path,
    *,
    tokenizer: str = BYTES,
    field: str = "",
    chat: bool = False,
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
    `split`). tokenizer: `bytes`, or a `tokenizers` JSON file, optionally with a tokenizer_config.json in its folder,
    or that folder. field is `text` if it is empty. chat: records are conversations in `field`, `messages` if it is
    empty; the data has flags, and of a conversation only what the assistant says is trained on.
    end_of_text: the token after each document, instead of the tokenizer's own. max_tokens ends early; 0 takes
    everything. warn receives doubts about the input. console shows a progress bar. Raises ConfigError: a file or
    library is missing, a record has no such field, `out` exists.
    """
    if not sources:
        raise ConfigError("no source of text was named")
    encoder = read_encoder(tokenizer, end_of_text)
    if chat and encoder.encode_chat is None:
        raise ConfigError("has no chat template, and --chat needs one", tokenizer)
    if encoder.end_of_text is None and not chat:
        warn(f"{tokenizer}: names no end-of-text token, so documents run into each other; name it with --end-of-text")
    part = Field(field or ("messages" if chat else "text"), is_chat=chat)
    opened = [source for name in sources for source in open_sources(name, field=part, config=config, split=split)]
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
                has_flags=chat,
            ) as writer,
        ):
            if encoder.file:
                (writer.folder / TOKENIZER_NAME).write_bytes(encoder.file.read_bytes())
                (writer.folder / TOKENIZER_CONFIG_NAME).write_text(encoder.config + "\n", encoding="utf-8")
            sizes = [source.size for source in opened]
            task = progress.add_task("preparing", total=sum(sizes) if all(sizes) else None, tokens=0)
            for tokens, flags, size in _token_stream(opened, encoder):
                room = max_tokens - writer.num_tokens if max_tokens else len(tokens)
                writer.append(tokens[:room], flags[:room] if chat else None)
                progress.update(task, advance=size, tokens=writer.num_tokens)
                if max_tokens and writer.num_tokens >= max_tokens:
                    break
            if not writer.num_tokens:
                raise ConfigError("no text in it", ", ".join(sources))
    except DataError as error:
        raise ConfigError(error.reason, error.path) from error
    return read_index(out)


def _token_stream(sources: Sequence[Source], encoder: Encoder) -> Iterator[tuple[Tokens, Flags, float]]:
    """Yield tokens in order with their flags, each with the share of the sources' sizes read so far."""
    for source in sources:
        for document, size in source.documents():
            begins = BEGINS_DOCUMENT
            try:
                for tokens, flags in _encoded(document, encoder):
                    if len(tokens):
                        flags[0] |= begins
                        begins = 0
                    yield tokens, flags, 0.0
            except UnicodeDecodeError as error:
                raise ConfigError("is not UTF-8 text", source.name) from error
            yield np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.uint8), size


def _encoded(document: Document, encoder: Encoder) -> Iterator[tuple[Tokens, Flags]]:
    """Yield a document's tokens with their flags: all of a text and its end, of a conversation what is an answer."""
    is_text = True
    for piece in document:
        if isinstance(piece, Conversation):
            assert encoder.encode_chat is not None, "prepare() asks for a chat template"
            tokens, is_spoken = encoder.encode_chat(piece)
            is_text = False
            yield tokens, is_spoken.astype(np.uint8) * IS_TARGET
        else:
            tokens = encoder.encode(piece)
            yield tokens, np.full(len(tokens), IS_TARGET, dtype=np.uint8)
    if is_text and encoder.end_of_text is not None:
        yield np.array([encoder.end_of_text], dtype=np.int64), np.full(1, IS_TARGET, dtype=np.uint8)
