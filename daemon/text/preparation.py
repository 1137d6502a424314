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

    tokenizer: str = "bytes"
    """`bytes`, a `tokenizers` JSON file, or its folder."""
    field: str = ""
    """Column of the text, or of the messages; empty: `text`, or a known form."""
    chat: bool = False
    """Records are conversations; train on what the assistant says."""
    pairs: bool = False
    """Records have a chosen and a rejected answer, for objective = "dpo"."""
    binary: bool = False
    """Take each file as it is, text or not."""
    config: str | None = None
    """Configuration of a data set."""
    split: str = "train"
    """Split of a data set."""
    end_of_text: Annotated[str, typer.Option(metavar="TOKEN")] = ""
    """Token after each document, instead of the tokenizer's own."""
    no_bos: bool = False
    """Begin no text with the token that the tokenizer itself puts there."""
    max_tokens: Annotated[int, typer.Option(min=0)] = 0
    """Maximum number of tokens; 0: all."""
    pack: Annotated[int, typer.Option(metavar="LENGTH")] = 0
    """Pack whole documents into rows for sequences of this length; 0: one stream."""
    flags: bool = False
    """Mark where documents begin; --chat and --pack always do."""
    validation: Annotated[float, typer.Option(metavar="SHARE")] = 0.0
    """Share of the documents that are held out for evaluation."""
    seed: int = 0
    """Chooses which documents are held out."""
    special_tokens: bool = False
    """Names of special tokens in texts and messages are these tokens."""
    date: Annotated[str, typer.Option(metavar="DAY")] = str(TODAY)
    """The day that chat templates are told: the same data, the same tokens."""
    max_bad: Annotated[int, typer.Option(min=0)] = 100
    """Records that may be left out, with a warning, because they cannot be used."""

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
