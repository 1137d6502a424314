"""A text with words like special tokens goes another way to its tokens: without such words, they are the same."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.daemon.text.chat_mask import ChatText
from headway.daemon.text.encoder import read_encoder
from headway.daemon.text.preparation import Preparation
from headway.daemon.text.special_words import SpecialWords, unguarded

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

SPECIAL = ("<s>", "</s>", "<|end|>")
TEXTS = ["hello there big world, how are you?\n  fine thanks <|end|>"] * 5
BITS = ["hello", " there", *SPECIAL, "<|l|>", "<|r|>", "<|w|>", "<think>", "<|n|>", "  ", "\n", " big", "x", "é"]


def bytelevel() -> Any:
    found = tokenizers.Tokenizer(tokenizers.models.BPE())
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    found.train_from_iterator(TEXTS, trainer)
    return found


def metaspace(scheme: str) -> Any:
    found = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    found.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=scheme)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>"], show_progress=False)
    found.train_from_iterator(TEXTS, trainer)
    return found


def unigram() -> Any:
    found = tokenizers.Tokenizer(tokenizers.models.Unigram())
    found.normalizer = tokenizers.normalizers.NFKC()
    found.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=80, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    found.train_from_iterator(TEXTS, trainer)
    return found


def normalised() -> Any:
    """In the style of Llama 2: a normaliser puts the spaces, and no pre-tokenizer cuts."""
    normalizers = tokenizers.normalizers
    found = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>", fuse_unk=True))
    found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>"], show_progress=False)
    found.train_from_iterator([text.replace(" ", "▁") for text in TEXTS], trainer)
    return found


MAKERS: dict[str, Callable[[], Any]] = {
    "bytelevel": bytelevel,
    "metaspace first": lambda: metaspace("first"),
    "metaspace always": lambda: metaspace("always"),
    "unigram": unigram,
    "normalised": normalised,
}


@pytest.mark.parametrize("kind", MAKERS)
def test_without_such_words_both_ways_give_the_same_tokens(tmp_path: Path, kind: str) -> None:
    """Random texts of words, spaces and added tokens of every sort: equal ids and offsets."""
    tokenizer = MAKERS[kind]()
    added = tokenizers.AddedToken
    tokenizer.add_special_tokens(
        [*SPECIAL, added("<|l|>", lstrip=True), added("<|r|>", rstrip=True), added("<|w|>", single_word=True)]
    )
    tokenizer.add_tokens([added("<think>", normalized=False), added("<|n|>", normalized=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    encoder = read_encoder(Preparation(tokenizer=str(tmp_path))).chats
    assert encoder is not None
    chance = random.Random(5)
    for _ in range(400):
        text = "".join(chance.choice(BITS) for _ in range(chance.randint(1, 12)))
        expected = tokenizer.encode(text, add_special_tokens=False)
        found = encoder._with_words(ChatText(text=text, spans=(), words=frozenset()))
        meant = [encoder._second.meant.get(token, token) for token in found.ids]
        assert (meant, found.offsets) == (expected.ids, expected.offsets), text


def test_guards_say_where_words_are() -> None:
    """The guarded text loses its guards, and the begins of the names are known."""
    words = SpecialWords(["<|end|>", "<s>", "x"])
    guarded = words.guarded({"a": ["to <s> and <|end|>", 3, "x"]})["a"][0]
    text, begins = unguarded(guarded)
    assert text == "to <s> and <|end|>"
    assert list(begins) == [3, 11]
    assert list(words.places(text, {3})) == [(11, 18)]
    assert words.count(text.encode()) == 2
