"""Pairs of answers become rows of whole pairs, the preferred answer first; only where they differ are targets."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.jobs.data_choices import with_flags_of
from headway.daemon.text.documents import BadRecord, Pair
from headway.daemon.text.preparation import Preparation
from headway.daemon.text.prepare import prepare
from headway.daemon.text.records import Field
from headway.daemon.text.summary import Prepared, lines_of
from headway.stages.data.shard_index import BEGINS_DOCUMENT, IS_TARGET
from headway.stages.data.tokens import TokenShards
from headway.stages.spec import TrainSpec
from tests.rigs.tiny_chats import CHATML, folder_of

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

PAIRS: list[dict[str, Any]] = [
    {"prompt": "2+2?", "chosen": "It is 4", "rejected": "It is 5, so long"},
    {
        "prompt": [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}],
        "chosen": [{"role": "assistant", "content": "Hello"}],
        "rejected": [{"role": "assistant", "content": "there there there"}],
    },
    {
        "chosen": [{"role": "user", "content": "Bye"}, {"role": "assistant", "content": "So long"}],
        "rejected": [{"role": "user", "content": "Bye"}, {"role": "assistant", "content": "No"}],
    },
]


def prepared(tmp_path: Path, records: list[Any], *, pack: int = 96, **options: Any) -> Prepared:
    """The folder `out` of records."""
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer = str(folder_of(tmp_path, CHATML))
    wanted = Preparation(tokenizer=tokenizer, pairs=True, pack=pack, max_bad=0, **options)
    return prepare([str(tmp_path / "in.jsonl")], tmp_path / "out", wanted)


def test_a_row_has_whole_pairs_and_their_differences_as_targets(tmp_path: Path) -> None:
    """Texts, a prompt of messages, whole conversations → each pair beside its own, in one row, with what they differ
    in.
    """
    index = prepared(tmp_path, PAIRS).index
    assert (index.holds_pairs, index.format, index.row_tokens) == (True, 3, 97)
    shards = TokenShards.open(tmp_path / "out")
    tokens, flags = (np.array(each) for each in (shards.maps[0], shards.flag_maps[0]))
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer/tokenizer.json"))
    begins = [*np.flatnonzero(flags & BEGINS_DOCUMENT).tolist(), len(tokens)]
    documents = [slice(a, b) for a, b in pairwise(begins)]
    said = [
        tokenizer.decode(tokens[each][(flags[each] & IS_TARGET) > 0].tolist(), skip_special_tokens=False)
        for each in documents
    ]
    assert set(zip(said[::2], said[1::2], strict=True)) == {
        ("4<|end|>\n", "5, so long<|end|>\n"),
        ("Hello<|end|>\n", "there there there<|end|>\n"),
        ("So long<|end|>\n", "No<|end|>\n"),
    }
    for row in range(len(tokens) // 97):
        assert (flags[row * 97 : (row + 1) * 97] & BEGINS_DOCUMENT > 0).sum() % 2 == 0


def test_a_pair_that_is_longer_than_a_row_is_left_out(tmp_path: Path) -> None:
    """It is not cut, since half an answer is no preference; the summary counts its tokens."""
    made = prepared(tmp_path, [{"prompt": "x" * 200, "chosen": "a", "rejected": "b"}, *PAIRS])
    assert made.train.left_out > 400
    assert made.train.cut_documents == 0
    assert any("stood in pairs that are longer than a row" in line for line in lines_of(tmp_path / "out", made))


def test_rows_that_no_pair_fits_are_said_to_be_short(tmp_path: Path) -> None:
    """The file is not at fault."""
    with pytest.raises(ConfigError, match="longer than a row is left out: name a larger --pack"):
        prepared(tmp_path, PAIRS, pack=8)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": "p", "chosen": "a"}, "has no answer in the field 'rejected'; a pair is `prompt`, `chosen` and"),
        ({"prompt": "p", "chosen": "a", "rejected": ["b"]}, "message 2 is no table with a role"),
        ({"question": "p", "chosen": "a", "rejected": "b"}, "has no question before 'chosen'; it has question, chosen"),
        (
            {"prompt": "p", "chosen": [{"role": "user", "content": "q"}], "rejected": "b"},
            "has a prompt, and 'chosen' begins with another question",
        ),
        ({"prompt": "p", "chosen": "same", "rejected": "same"}, "of which one is the beginning of the other"),
    ],
)
def test_what_is_no_pair_is_named_by_its_line(tmp_path: Path, record: dict[str, Any], reason: str) -> None:
    """An answer is missing, is no message, or is the same twice."""
    with pytest.raises(ConfigError, match=reason):
        prepared(tmp_path, [record])


def test_a_question_that_both_answers_repeat_stands_once() -> None:
    """As published pairs have it: `prompt` beside answers that begin with it, and a `system` column."""
    question, answers = {"role": "user", "content": "2+2?"}, [{"role": "assistant", "content": each} for each in "45"]
    record: dict[str, Any] = {"system": "Be brief", "prompt": "2+2?"}
    record |= {name: [question, answer] for name, answer in zip(("chosen", "rejected"), answers, strict=True)}
    found = Field(is_pair=True).document(record, "in.jsonl, line 1")
    assert not isinstance(found, BadRecord)
    (pair,) = found
    assert isinstance(pair, Pair)
    system = {"role": "system", "content": "Be brief"}
    assert [pair.preferred.messages, pair.other.messages] == [[system, question, answer] for answer in answers]


def test_pairs_by_the_names_of_openai_are_the_same() -> None:
    """`input`, `preferred_output` and `non_preferred_output`, with the tools that stand in the input."""
    question, answers = {"role": "user", "content": "2+2?"}, [{"role": "assistant", "content": each} for each in "45"]
    tools = [{"type": "function", "function": {"name": "add"}}]
    record: dict[str, Any] = {"input": {"messages": [question], "tools": tools, "parallel_tool_calls": True}}
    record |= {"preferred_output": answers[:1], "non_preferred_output": answers[1:]}
    found = Field(is_pair=True).document(record, "in.jsonl, line 1")
    assert not isinstance(found, BadRecord), found
    (pair,) = found
    assert isinstance(pair, Pair)
    assert [pair.preferred.messages, pair.other.messages] == [[question, answer] for answer in answers]
    assert pair.other.tools == tools
    assert set(Field(is_pair=True).columns(list(record))) == set(record)


def test_pairs_need_rows() -> None:
    """Without --pack there is no row that a pair could stay in."""
    with pytest.raises(ConfigError, match="makes rows of whole pairs; add --pack"):
        Preparation(pairs=True)


def test_a_microbatch_divides_by_the_pairs_of_its_batch(tmp_path: Path) -> None:
    """Three pairs in one row, drawn each time → m microbatches of s rows divide by 3 · s."""
    index = prepared(tmp_path, PAIRS, pack=300).index
    train = TrainSpec(objective="dpo", sequence_length=300, microbatches=2, microbatch_size=2)
    rows = TokenShards.open(tmp_path / "out").microbatch(
        with_flags_of(train, index, "j"), seed=1, batch=0, microbatch=0
    )
    assert rows.mean_tokens is not None
    assert float(rows.mean_tokens) == 6.0
