"""What `headway data prepare` can be asked for."""

import datetime
from dataclasses import dataclass
from typing import Annotated, Final

import typer

from headway.daemon.base.errors import ConfigError

TODAY: Final = datetime.date(2026, 1, 1)
"""The date that chat templates are told unless another is asked for: the same data gives the same tokens every day."""
MAX_PACKED: Final = 1 << 24
"""Maximum sequence length of packed rows, which bounds the memory for open rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """The options of `headway data prepare`. Raises ConfigError for those that do not fit each other."""

    tokenizer: Annotated[str, typer.Option(help="`bytes`, a `tokenizers` JSON file, or its folder.")] = "bytes"
    field: Annotated[
        str, typer.Option(help="Column of the text, or of the messages; empty: `text`, or a known form.")
    ] = ""
    chat: Annotated[
        bool, typer.Option("--chat", help="Records are conversations; train on what the assistant says.")
    ] = False
    pairs: Annotated[
        bool, typer.Option("--pairs", help='Records have a chosen and a rejected answer, for objective = "dpo".')
    ] = False
    binary: Annotated[bool, typer.Option("--binary", help="Take each file as it is, text or not.")] = False
    config: Annotated[str | None, typer.Option(help="Configuration of a data set.", show_default=False)] = None
    split: Annotated[str, typer.Option(help="Split of a data set.")] = "train"
    end_of_text: Annotated[
        str,
        typer.Option(
            metavar="TOKEN", help="Token after each document, instead of the tokenizer's own.", show_default=False
        ),
    ] = ""
    no_bos: Annotated[
        bool, typer.Option("--no-bos", help="Begin no text with the token that the tokenizer itself puts there.")
    ] = False
    max_tokens: Annotated[int, typer.Option(min=0, help="Maximum number of tokens; 0: all.")] = 0
    pack: Annotated[
        int,
        typer.Option(
            metavar="LENGTH", help="Pack whole documents into rows for sequences of this length; 0: one stream."
        ),
    ] = 0
    flags: Annotated[bool, typer.Option("--flags", help="Mark where documents begin; --chat and --pack always do.")] = (
        False
    )
    validation: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of the documents that are held out for evaluation.")
    ] = 0.0
    seed: Annotated[int, typer.Option(help="Chooses which documents are held out.")] = 0
    special_tokens: Annotated[
        bool, typer.Option("--special-tokens", help="Names of special tokens in texts and messages are these tokens.")
    ] = False
    date: Annotated[
        str, typer.Option(metavar="DAY", help="The day that chat templates are told: the same data, the same tokens.")
    ] = str(TODAY)
    max_bad: Annotated[
        int, typer.Option(min=0, help="Records that may be left out, with a warning, because they cannot be used.")
    ] = 100

    def __post_init__(self) -> None:
        if not (self.pack == 0 or 2 <= self.pack <= MAX_PACKED):
            raise ConfigError(f"{self.pack} is not from 2 to {MAX_PACKED}", "--pack")
        if self.binary and (self.has_chats or self.field):
            raise ConfigError(
                "takes files as they are, without records; leave out --chat, --pairs and --field", "--binary"
            )
        if self.pairs and (not self.pack or self.field or self.max_tokens):
            raise ConfigError("makes rows of whole pairs; add --pack, leave out --field and --max-tokens", "--pairs")
        if not 0 <= self.validation < 1:
            raise ConfigError(f"{self.validation} is not a share from 0 to below 1", "--validation")
        if not 0 <= self.seed < 1 << 64:
            raise ConfigError(f"{self.seed} is not from 0 to 2^64 - 1", "--seed")
        try:
            datetime.date.fromisoformat(self.date)
        except ValueError as error:
            raise ConfigError(f"{self.date!r} is no day: write 2026-01-31", "--date") from error

    @property
    def has_chats(self) -> bool:
        """Return whether records are conversations, or pairs of them."""
        return self.chat or self.pairs

    @property
    def has_flags(self) -> bool:
        """Return whether each token gets flags."""
        return self.has_chats or self.flags or self.pack > 0

    @property
    def row_tokens(self) -> int:
        """Return the length of rows; 0: there are none."""
        return self.pack + 1 if self.pack else 0
