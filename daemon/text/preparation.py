"""What `headway data prepare` was asked for, and what it made."""

from collections import Counter
from dataclasses import dataclass, field
from datetime import date
from typing import Final

from headway.daemon.base.errors import ConfigError
from headway.daemon.text.batch_encoding import HeldOut
from headway.daemon.text.data_tokenizer import BYTES
from headway.daemon.text.destination import SplitCounts
from headway.daemon.text.encoder import TODAY, Reading
from headway.daemon.text.records import Field
from headway.stages.data.shard_index import ShardIndex

MAX_PACKED: Final = 1 << 24
"""Maximum sequence length of packed rows, which bounds the memory for open rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """The options. Raises ConfigError for those that do not fit each other."""

    tokenizer: str = BYTES
    """`bytes`, or a `tokenizers` JSON file, optionally with a tokenizer_config.json in its folder, or that folder."""
    field: str = ""
    """Column of the text, or of the messages; empty: `text`, or those of a known form of conversations."""
    chat: bool = False
    """Records are conversations; only what the assistant says is trained on."""
    pairs: bool = False
    """Records are pairs of conversations, of which one is preferred: for `objective = "dpo"`."""
    binary: bool = False
    """Each file is one document of its bytes, whatever it holds."""
    config: str | None = None
    """Configuration of a Hugging Face data set."""
    split: str = "train"
    """Split of a Hugging Face data set, also of a saved one."""
    end_of_text: str = ""
    """Token after each document, instead of the tokenizer's own."""
    max_tokens: int = 0
    """Tokens of documents after which to end; 0: no limit."""
    pack: int = 0
    """Sequence length of rows that are packed with whole documents; 0: one stream."""
    flags: bool = False
    """Also give flags to text that is one stream, so that a job can end attention with documents."""
    validation: float = 0.0
    """Share of the documents that are held out."""
    seed: int = 0
    """Chooses which documents are held out."""
    bos: bool = True
    """Each text begins with the token that the tokenizer's own post-processor puts there."""
    special_tokens: bool = False
    """Names of special tokens in texts and messages are these tokens."""
    date: str = str(TODAY)
    """The day that chat templates are told, as YYYY-MM-DD."""
    max_bad: int = 0
    """Records that may be left out because they cannot be used."""

    def __post_init__(self) -> None:
        if not (self.pack == 0 or 2 <= self.pack <= MAX_PACKED):
            raise ConfigError(f"{self.pack} is not from 2 to {MAX_PACKED}", "--pack")
        if self.binary and (self.chat or self.field):
            raise ConfigError(
                "takes files as they are, without records; leave out --chat, --pairs and --field", "--binary"
            )
        if self.pairs and (not (self.chat and self.pack) or self.field or self.max_tokens):
            raise ConfigError("makes rows of whole pairs; add --pack, leave out --field and --max-tokens", "--pairs")
        if not 0 <= self.validation < 1:
            raise ConfigError(f"{self.validation} is not a share from 0 to below 1", "--validation")
        if not 0 <= self.seed < 1 << 64:
            raise ConfigError(f"{self.seed} is not from 0 to 2^64 - 1", "--seed")

        self.reading  # noqa: B018 - a date that is none is refused at once

    @property
    def reading(self) -> Reading:
        """Return how the tokenizer reads texts and conversations."""
        try:
            today = date.fromisoformat(self.date)
        except ValueError as error:
            raise ConfigError(f"{self.date!r} is no day: write 2026-01-31", "--date") from error
        return Reading(
            end_of_text=self.end_of_text, has_begin=self.bos, has_special_words=self.special_tokens, today=today
        )

    @property
    def record_field(self) -> Field:
        """Return the part of a record that is trained on."""
        return Field(self.field, is_chat=self.chat, is_pair=self.pairs)

    @property
    def has_flags(self) -> bool:
        """Return whether each token gets flags."""
        return self.chat or self.flags or self.pack > 0

    @property
    def row_tokens(self) -> int:
        """Return the length of rows; 0: there are none."""
        return self.pack + 1 if self.pack else 0

    @property
    def held_out(self) -> HeldOut:
        """Return the choice of the validation split."""
        return HeldOut(share=self.validation, seed=self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A finished data folder."""

    index: ShardIndex
    train: SplitCounts
    begin_of_text: str = ""
    """What each text begins with; empty: nothing."""
    num_bad: int = 0
    """Records that were left out."""
    bad_kinds: Counter[str] = field(default_factory=Counter)
    """Why, without the numbers in it."""
    noted: Counter[str] = field(default_factory=Counter)
    """What else the summary counts, by kind."""
    validation: SplitCounts = field(default_factory=lambda: SplitCounts(documents=0, tokens=0))
