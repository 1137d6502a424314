"""Conversations become tokens by the tokenizer's own chat template; only what the assistant says is a target."""

import json
from pathlib import Path
from typing import Any

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.text.chat_mask import spoken_tokens
from headway.daemon.text.preparation import Preparation
from headway.daemon.text.prepare import prepare
from headway.stages.data.tokens import TokenShards
from tests.rigs.tiny_chats import CHATML, folder_of

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

MARKED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant\n"
    "{% generation %}{{ m.content }}<|end|>{% endgeneration %}\n"
    "{% else %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
)
CHATS = [
    [("user", "Hi there"), ("assistant", "Hello, ça va?"), ("user", "Bye"), ("assistant", "So long")],
    [("system", "Be brief"), ("user", "2+2?"), ("assistant", "4")],
    [("user", "no answer")],
]


def messages_of(chat: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in chat]


def prepared(tmp_path: Path, folder: Path, records: list[Any]) -> tuple[list[int], list[int]]:
    """The tokens and the flags of records."""
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    prepare([str(tmp_path / "in.jsonl")], tmp_path / "out", Preparation(tokenizer=str(folder), chat=True, max_bad=0))
    shards = TokenShards.open(tmp_path / "out")
    return list(map(int, shards._tokens._maps[0])), list(map(int, shards._flags._maps[0]))


@pytest.mark.parametrize("in_file", [True, False])
def test_marks_of_a_template_give_the_mask_of_transformers(tmp_path: Path, in_file: bool) -> None:
    """Tokens and mask of three conversations equal those of apply_chat_template; each begins a document."""
    transformers = pytest.importorskip("transformers")
    folder = folder_of(tmp_path, MARKED, in_file=in_file)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="<|end|>", chat_template=MARKED
    )
    tokens: list[int] = []
    flags: list[int] = []
    for chat in CHATS:
        found = theirs.apply_chat_template(
            messages_of(chat), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        tokens += found["input_ids"]
        mask = list(found["assistant_masks"])
        flags += [mask[0] | 2, *mask[1:]]
    assert prepared(tmp_path, folder, [{"messages": messages_of(chat)} for chat in CHATS]) == (tokens, flags)


def test_without_marks_an_answer_is_what_follows_its_prompt(tmp_path: Path) -> None:
    """The targets are the answers with the ends that the template gives them, and nothing else."""
    folder = folder_of(tmp_path, CHATML)
    tokens, flags = prepared(tmp_path, folder, [{"messages": messages_of(chat)} for chat in CHATS])
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    spoken = [token for token, flag in zip(tokens, flags, strict=True) if flag & 1]
    said = "".join(text + "<|end|>\n" for chat in CHATS for role, text in chat if role == "assistant")
    assert tokenizer.decode(spoken, skip_special_tokens=False) == said
    assert sum(flag >> 1 for flag in flags) == len(CHATS)


@pytest.mark.parametrize(
    ("template", "record", "error"),
    [
        (CHATML, {"text": "x"}, "in.jsonl, line 2: has no list of messages"),
        (CHATML, {"messages": ["x"]}, "in.jsonl, line 2: message 1 is no table with a role"),
        (
            "{{ raise_exception('roles must alternate') }}",
            {"messages": [{"role": "user"}]},
            "line 1: .* must alternate",
        ),
        ("{{ messages.append(1) }}", {"messages": [{"role": "user"}]}, "line 1: .* unsafe"),
        (
            "{{ messages|length }}{{ messages[0].content }}",
            {"messages": []},
            "line 1: the chat template writes message 2 in no place",
        ),
        ("{% for", {"messages": []}, "its chat template is invalid"),
        (None, {"messages": []}, "has no chat template"),
    ],
)
def test_what_is_wrong_is_one_line_with_its_place(tmp_path: Path, template: str, record: Any, error: str) -> None:
    """A record without messages, and templates that fail, name the line of the data; no folder appears."""
    folder = folder_of(tmp_path, template)
    with pytest.raises(ConfigError, match=error) as raised:
        prepared(tmp_path, folder, [{"messages": messages_of(CHATS[0])}, record])
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_a_token_that_reaches_over_the_begin_of_an_answer_counts() -> None:
    """A token is a target if any of its characters is spoken; offsets may leave out a space before it."""
    offsets = [(0, 4), (5, 9), (9, 10)]  # the second token begins at 4: its offsets leave out a space
    assert spoken_tokens(offsets, [(4, 9)]).tolist() == [False, True, False]
    assert spoken_tokens(offsets, [(5, 9)]).tolist() == [False, True, False]
    assert spoken_tokens(offsets, [(3, 9)]).tolist() == [True, True, False]
