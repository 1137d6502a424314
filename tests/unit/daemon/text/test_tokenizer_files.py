"""A tokenizers file serves for its vocabulary: no text is lost by its settings, and no text becomes the end of one."""

import json
from pathlib import Path
from typing import Any

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.text.data_tokenizer import special_tokens, tokenizer_of
from headway.daemon.text.preparation import Preparation
from headway.daemon.text.prepare import prepare
from headway.stages.data.shard_index import read_index
from headway.stages.data.tokens import TokenShards

tokenizers = pytest.importorskip("tokenizers")

END = "<|endoftext|>"


def byte_level(path: Path, *, end: str = END, is_special: bool = True) -> Any:
    """A tokenizer of bytes, and one token more for the end of a text."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_tokens([tokenizers.AddedToken(end, special=is_special, normalized=False)])
    tokenizer.save(str(path))
    return tokenizer


def prepared(tmp_path: Path, **options: Any) -> list[int]:
    prepare(
        [str(tmp_path / "in.txt")], tmp_path / "out", Preparation(tokenizer=str(tmp_path / "tokenizer.json"), **options)
    )
    return list(TokenShards.open(tmp_path / "out")._tokens._maps[0])


def test_truncation_and_padding_of_a_tokenizer_file_are_ignored(tmp_path: Path) -> None:
    """Its settings say 8 tokens padded to 16: all tokens of the text are there, and no others."""
    tokenizer = byte_level(tmp_path / "tokenizer.json")
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "in.txt").write_text("x" * 1000)
    found = prepared(tmp_path)
    assert len(found) == 1001
    assert len(set(found)) == 2


@pytest.mark.parametrize("is_special", [True, False])
def test_the_name_of_the_end_token_in_a_text_is_not_the_end(tmp_path: Path, is_special: bool) -> None:
    """A text about `<|endoftext|>` keeps its thirteen characters, and one end follows the document."""
    byte_level(tmp_path / "tokenizer.json", is_special=is_special)
    (tmp_path / "in.txt").write_text(f"say {END} twice: {END}")
    found = prepared(tmp_path)
    assert found.count(256) == 1
    assert found[-1] == 256
    assert len(found) == len(f"say {END} twice: {END}") + 1


def test_the_name_of_the_end_token_as_a_word_is_not_the_end(tmp_path: Path) -> None:
    """The vocabulary has the name as a word: in the text it becomes two unknown words."""
    model = tokenizers.models.WordLevel({"?": 0, "one": 1, END: 2}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "in.txt").write_text(f"one {END} one")
    assert prepared(tmp_path) == [1, 0, 0, 1, 2]


def words(path: Path, vocabulary: dict[str, int], *, is_folded: bool = False) -> None:
    """A tokenizer of words, which takes them in lower case if is_folded."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    if is_folded:
        tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.save(str(path))


def test_a_word_normalized_to_the_end_token_is_not_the_end(tmp_path: Path) -> None:
    """A normalizer makes the name of a word that is written otherwise: that is cut too."""
    words(tmp_path / "tokenizer.json", {"?": 0, "one": 1, "<eos>": 2}, is_folded=True)
    (tmp_path / "in.txt").write_text("one <EOS> ONE <eos>")
    assert prepared(tmp_path) == [1, 0, 0, 1, 0, 0, 2]


def test_overlapping_names_of_the_end_token_are_not_the_end(tmp_path: Path) -> None:
    """The end is `aa` and the text has five `a`: after one cut another may appear."""
    model = tokenizers.models.BPE(vocab={"a": 0, "b": 1, "aa": 2}, merges=[("a", "a")])
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "in.txt").write_text("baaaaab")
    assert prepared(tmp_path, end_of_text="aa") == [1, 0, 0, 0, 0, 0, 1, 2]


def test_an_end_of_one_character_is_refused_in_a_text(tmp_path: Path) -> None:
    """It cannot be cut, and no other token stands for it: one line that says what to do, and no end inside a text."""
    words(tmp_path / "tokenizer.json", {"?": 0, "one": 1, "¶": 2})
    (tmp_path / "in.txt").write_text("one ¶ one")
    with pytest.raises(ConfigError, match=r"takes '¶' in a text for its end.*name another token with --end-of-text"):
        prepared(tmp_path, end_of_text="¶")
    (tmp_path / "in.txt").write_text("one one")
    assert prepared(tmp_path, end_of_text="¶") == [1, 1, 2]


@pytest.mark.parametrize("told", ["<fin>", {"content": "<fin>", "lstrip": False}])
def test_the_end_is_what_its_config_names(tmp_path: Path, told: object) -> None:
    """A name that nobody else has, in tokenizer_config.json beside the file; it goes along to a model."""
    byte_level(tmp_path / "tokenizer.json", end="<fin>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": told, "bos_token": "<nobody>"}))
    (tmp_path / "in.txt").write_text("ab")
    assert prepared(tmp_path)[-1] == 256
    found = tokenizer_of(tmp_path / "out", read_index(tmp_path / "out"))
    assert found is not None
    assert found.special.ids == {"eos_token_id": 256, "bos_token_id": None, "pad_token_id": None}
    assert found.special.texts == {"eos_token": "<fin>"}


def test_a_flag_may_name_the_end_token(tmp_path: Path) -> None:
    """--end-of-text overrides everything. An unknown token is refused, and a missing one gives a warning."""
    byte_level(tmp_path / "tokenizer.json", end="<fin>")
    (tmp_path / "in.txt").write_text("ab")
    with pytest.raises(ConfigError, match=r"--end-of-text: '<end>' is not a token of"):
        prepared(tmp_path, end_of_text="<end>")
    warnings: list[str] = []
    prepare(
        [str(tmp_path / "in.txt")],
        tmp_path / "without",
        Preparation(tokenizer=str(tmp_path / "tokenizer.json")),
        warn=warnings.append,
    )
    assert len(warnings) == 1
    assert "name it with --end-of-text" in warnings[0]
    assert prepared(tmp_path, end_of_text="<fin>")[-1] == 256


def test_a_torn_tokenizer_config_is_one_line(tmp_path: Path) -> None:
    byte_level(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text("{")
    (tmp_path / "in.txt").write_text("ab")
    with pytest.raises(ConfigError, match=r"tokenizer\.json: the tokenizer_config\.json beside it cannot be read"):
        prepared(tmp_path)


@pytest.mark.parametrize(
    "tokenizer",
    [
        {"model": {"vocab": [["a", 0.0], ["</s>", -1.0]]}},
        {"model": {"vocab": {"a": 0, "</s>": 1}}},
        {"added_tokens": [{"id": 1, "content": "</s>"}], "model": {"vocab": {}}},
    ],
)
def test_each_kind_of_vocabulary_is_known(tokenizer: dict[str, Any]) -> None:
    """Unigram lists, tables, and tokens that were added."""
    assert special_tokens(tokenizer, {}).eos_token_id == 1


def begins(name: str) -> Any:
    """A post-processor that puts a token before each text, as Llama 3's and Mistral's do."""
    return tokenizers.processors.TemplateProcessing(single=f"{name} $A", special_tokens=[(name, 257)])


@pytest.mark.parametrize(
    ("make", "config"),
    [
        (lambda: begins("<s>"), {}),
        (lambda: tokenizers.processors.Sequence([tokenizers.processors.ByteLevel(), begins("<s>")]), {}),
        (lambda: tokenizers.processors.RobertaProcessing((END, 256), ("<s>", 257)), {}),
        (tokenizers.processors.ByteLevel, {}),
        (tokenizers.processors.ByteLevel, {"add_bos_token": True, "bos_token": "<s>"}),
        (lambda: begins("<s>"), {"add_bos_token": False, "bos_token": "<s>"}),
    ],
    ids=["template", "sequence", "roberta", "none", "config", "config without"],
)
def test_a_text_begins_as_its_tokenizer_begins_it(tmp_path: Path, make: Any, config: dict[str, Any]) -> None:
    """As transformers does; without a begin if asked; and never twice."""
    transformers = pytest.importorskip("transformers")
    tokenizer = byte_level(tmp_path / "tokenizer.json")
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = make()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "in.txt").write_text("text")
    of_transformers = transformers.AutoTokenizer.from_pretrained(str(tmp_path))("text").input_ids
    without = tokenizer.encode("text", add_special_tokens=False).ids
    begin = of_transformers[: of_transformers.index(without[0])]
    assert prepared(tmp_path) == [*begin, *without, 256]
    (tmp_path / "out").rename(tmp_path / "default")
    assert prepared(tmp_path, no_bos=True) == [*without, 256]
    (tmp_path / "out").rename(tmp_path / "no begin")
    (tmp_path / "in.txt").write_text("<s>text")
    assert prepared(tmp_path, special_tokens=True) == [257, *without, 256]


def test_of_a_cut_document_the_first_part_has_the_begin(tmp_path: Path) -> None:
    """Two texts, the first longer than a row: each has one begin, flagged as the document's; an empty one has both."""
    tokenizer = byte_level(tmp_path / "tokenizer.json")
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = begins("<s>")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    lines = [json.dumps({"text": text}) for text in ("abcdef", "gh", "")]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    source, encoder = [str(tmp_path / "in.jsonl")], str(tmp_path / "tokenizer.json")
    said = prepare(source, tmp_path / "rows", Preparation(tokenizer=encoder, pack=4))
    shards = TokenShards.open(tmp_path / "rows")
    a, g = (
        tokenizer.encode("abcdef", add_special_tokens=False).ids,
        tokenizer.encode("gh", add_special_tokens=False).ids,
    )
    assert said.begin_of_text == "<s>"
    rows = [[257, *a[:4]], [*a[3:6], 256], [257, *g, 256], [257, 256]]
    found = shards._tokens._maps[0].reshape(-1, 5).tolist()
    assert all(any(row[: len(part)] == part or row[-len(part) :] == part for row in found) for part in rows)
    prepare(source, tmp_path / "stream", Preparation(tokenizer=encoder, flags=True))
    flags = TokenShards.open(tmp_path / "stream")._flags.windows([0], 14).tolist()
    assert flags == [[3, *[1] * 7, 3, 1, 1, 1, 3, 1]]
