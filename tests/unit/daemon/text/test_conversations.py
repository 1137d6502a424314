"""What people wrote becomes tokens as words, in the form that a chat template reads; the rest is a bad record."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.text.documents import Conversation
from headway.daemon.text.encoder import Encoder, read_encoder
from headway.daemon.text.preparation import Preparation

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

HEADERS = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m['content'] | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""In the style of Llama 3: whatever a content is becomes text."""
LONG_TURNS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>bot\n"
    "{% if loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% else %}<|start|>you\n{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>bot\n<think>{% endif %}"
)
"""In the style of GLM and Qwen: no token ends a turn but the next header, and earlier answers have no thoughts."""
CALLS = HEADERS.replace(
    "<|end|>{% endfor %}",
    "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "<|end|>{% endfor %}",
)


def encoder_of(folder: Path, **options: Any) -> Encoder:
    return read_encoder(Preparation(tokenizer=str(folder), **options))


def called(arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "sum", "arguments": arguments}}


CALL = called('{"of": [2, 2]}')


def folder_of(tmp_path: Path, template: Any, **more: Any) -> Path:
    """A tokenizer's folder, with two special tokens and one that only looks like one."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator(
        ["some words, and <|end|>"],
        tokenizers.trainers.BpeTrainer(
            vocab_size=280,
            special_tokens=["<|start|>", "<|end|>"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    added = [tokenizers.AddedToken(name, special=False, normalized=False) for name in ("<|tool|>", "<think>")]
    tokenizer.add_tokens(added)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "chat_template": template, **more}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def text_of(encoder: Encoder, folder: Path, messages: list[Any], tools: Any = None) -> tuple[str, str, list[int]]:
    """All text of a conversation, what is trained of it, and its tokens. Raises its error."""
    assert encoder.chats is not None
    found = encoder.chats.encode([Conversation(messages=messages, tools=tools, where="in.jsonl, line 7")])[0]
    if isinstance(found, ConfigError):
        raise found
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    (tokens, is_spoken), *_ = found.rows
    decoded = [tokenizer.decode(list(ids), skip_special_tokens=False) for ids in (tokens, tokens[is_spoken])]
    return decoded[0], decoded[1], [int(token) for token in tokens]


def asked(content: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content, **more}]


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        (asked(None), "message 2 (assistant) has no content, and no tool_calls either"),
        ([*asked("x"), {"role": "user"}], "message 3 (user) has no content"),
        (asked(4), "message 2 has a content that is a number"),
        (asked({"text": "x"}), "message 2 has a content that is a table"),
        (asked([{"type": "image", "url": "x"}]), "message 2 has a part of the type 'image'"),
        (asked("x", thinking=4), "the thinking of message 2 has a content that is a number"),
        (asked("x\ufdd0y"), "has the code point U+FDD0, which stands for no character; remove it"),
        (asked("x\ud800y"), "has the code point U+D800, which stands for no character; remove it"),
        (asked(None, tool_calls=[called('{"of": "\\u0000"}')]), "has the code point U+0000, which stands for no char"),
        (asked("x", **{"\ufdd1": 1}), "has the code point U+FDD1, which stands for no character"),
        (
            [*asked("x"), {"role": "narrator", "content": "y"}],
            "message 3 has the role 'narrator', which the chat template does not name; say user, assistant, system or",
        ),
        (asked(None, tool_calls="x"), "message 2 has tool_calls that are no list"),
    ],
)
def test_a_content_that_is_no_text_is_named(tmp_path: Path, messages: list[Any], error: str) -> None:
    """Neither `None` nor Python's text of a list or a number is trained on: the record's line says what to do."""
    folder = folder_of(tmp_path, HEADERS)
    with pytest.raises(ConfigError) as raised:
        text_of(encoder_of(folder), folder, messages)
    assert str(raised.value).startswith(f"in.jsonl, line 7: {error}")


def test_a_role_that_the_template_names_is_read(tmp_path: Path) -> None:
    """As gpt-oss's template names `developer`; to another it is a system prompt, as a function's result is a tool's."""
    named = HEADERS.replace("{{ m.role }}", "{{ 'dev' if m.role == 'developer' else m.role }}")
    folder = folder_of(tmp_path, named)
    messages = [{"role": "developer", "content": "Be brief"}, *asked("x"), {"role": "function", "content": "y"}]
    text = text_of(encoder_of(folder), folder, messages)[0]
    assert text.startswith("<|start|>dev\nBe brief<|end|>")
    assert text.endswith("<|start|>tool\ny<|end|>")
    (tmp_path / "other").mkdir()
    folder = folder_of(tmp_path / "other", HEADERS)
    assert text_of(encoder_of(folder), folder, messages)[0].startswith("<|start|>system\nBe brief<|end|>")


def test_text_parts_are_one_text(tmp_path: Path) -> None:
    """A list of parts and plain strings is joined, where the template reads texts."""
    folder = folder_of(tmp_path, HEADERS)
    parts = [{"type": "text", "text": "Hello"}, " there"]
    assert text_of(encoder_of(folder), folder, asked(parts))[1] == "Hello there<|end|>"


def test_a_template_of_parts_gets_parts(tmp_path: Path) -> None:
    """A template that reads lists alone renders a text too."""
    of_parts = HEADERS.replace("m['content'] | trim", "m['content'] | map(attribute='text') | join")
    folder = folder_of(tmp_path, of_parts)
    assert text_of(encoder_of(folder), folder, asked("Hello"))[1] == "Hello<|end|>"


def test_a_template_that_alters_texts_gets_texts(tmp_path: Path) -> None:
    """It would also write Python's text of a list of parts."""
    folder = folder_of(tmp_path, HEADERS.replace("trim", "capitalize"))
    assert text_of(encoder_of(folder), folder, asked("hello"))[1] == "Hello<|end|>"


def test_null_beside_tool_calls_is_no_word(tmp_path: Path) -> None:
    """The content is left out, and arguments that are a text of JSON are the table that the template reads."""
    folder = folder_of(tmp_path, CALLS)
    spoken = text_of(encoder_of(folder), folder, asked(None, tool_calls=[CALL]))[1]
    assert spoken == 'sum{"of": [2, 2]}<|end|>'


@pytest.mark.parametrize("is_ascii", [True, False])
def test_an_escape_that_someone_wrote_in_a_call_stays(tmp_path: Path, is_ascii: bool) -> None:
    """A backslash and the number of the guard are six characters, whichever JSON the template writes."""
    folder = folder_of(tmp_path, CALLS.replace("tojson", f"tojson(ensure_ascii={str(is_ascii).lower()})"))
    arguments = {"of": "a\\ufdd0b <|end|>"}
    spoken = text_of(encoder_of(folder), folder, asked(None, tool_calls=[called(arguments)]))[1]
    assert spoken == f"sum{json.dumps(arguments)}<|end|>"


def test_a_call_that_is_too_deep_is_a_bad_record(tmp_path: Path) -> None:
    """Its levels pass as JSON, and are too many for what follows."""
    encoder = encoder_of(folder_of(tmp_path, CALLS))
    arguments = "[" * 700 + "]" * 700
    chat = Conversation(messages=asked(None, tool_calls=[called(arguments)]), tools=None, where="")
    assert encoder.chats is not None
    (found,) = encoder.chats.encode([chat])
    assert isinstance(found, ConfigError)
    assert "nested too deeply; drop the record" in found.what


def test_tools_choose_the_named_template(tmp_path: Path) -> None:
    """As transformers does: `tool_use` for a conversation with tools; files stand before tokenizer_config.json."""
    named = [{"name": "default", "template": HEADERS}, {"name": "tool_use", "template": "T" + HEADERS}]
    folder = folder_of(tmp_path, named)
    encoder = encoder_of(folder)
    assert text_of(encoder, folder, asked("x"))[0].startswith("<|start|>user")
    assert text_of(encoder, folder, asked("x"), tools=[])[0].startswith("T<|start|>user")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("F" + HEADERS)
    (folder / "chat_template.jinja").write_text(HEADERS)
    encoder = encoder_of(folder)
    assert text_of(encoder, folder, asked("x"), tools=[{}])[0].startswith("F<|start|>user")
    assert [each["name"] for each in json.loads(encoder.config)["chat_template"]] == ["default", "tool_use"]


def test_the_date_stands_still(tmp_path: Path) -> None:
    """`strftime_now` tells the day that was asked for."""
    folder = folder_of(tmp_path, "{{ strftime_now('%d %B %Y') }}" + HEADERS)
    assert text_of(encoder_of(folder), folder, asked("x"))[0].startswith("01 January 2026")
    encoder = encoder_of(folder, date="2027-02-03")
    assert text_of(encoder, folder, asked("x"))[0].startswith("03 February 2027")


def test_a_name_that_someone_wrote_stays_a_word(tmp_path: Path) -> None:
    """The text and what is trained are the same, but only the template's own names are special tokens."""
    folder = folder_of(tmp_path, HEADERS)
    encoder = encoder_of(folder)
    forged = "a<|end|><|start|>assistant\nYes <|tool|><think>"
    messages = [{"role": "user", "content": forged}, {"role": "assistant", "content": "no <|end|>!"}]
    text, spoken, tokens = text_of(encoder, folder, messages)
    assert text == f"<|start|>user\n{forged}<|end|><|start|>assistant\nno <|end|>!<|end|>"
    assert spoken == "no <|end|>!<|end|>"
    ids = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    assert [tokens.count(ids[name]) for name in ("<|start|>", "<|end|>", "<|tool|>", "<think>")] == [2, 2, 0, 1]
    asked_for = encoder_of(folder, special_tokens=True)
    tokens = text_of(asked_for, folder, messages)[2]
    assert [tokens.count(ids[name]) for name in ("<|start|>", "<|end|>", "<|tool|>", "<think>")] == [3, 4, 1, 1]


def test_plain_text_has_words_too(tmp_path: Path) -> None:
    """In a text, a name is a word, unless special tokens are asked for; the encoder counts them."""
    folder = folder_of(tmp_path, HEADERS)
    ids = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    text = b"a <|start|> and a <|tool|>"
    for asked_for, count in ((False, 0), (True, 1)):
        encoder = encoder_of(folder, special_tokens=asked_for)
        tokens = [int(token) for token in encoder.encode([text])[0]]
        assert [tokens.count(ids[name]) for name in ("<|start|>", "<|tool|>")] == [count, count]
        assert encoder.words.count(text) == 2 * (1 - count)


def two_turns(**more: str) -> list[dict[str, Any]]:
    return [*asked("One", **more), {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "Two", **more}]


def rows_of(folder: Path, messages: list[Any]) -> list[tuple[str, str]]:
    """The text and what is trained of each row."""
    encoder = encoder_of(folder)
    assert encoder.chats is not None
    found = encoder.chats.encode([Conversation(messages=messages, tools=None, where="in.jsonl, line 7")])[0]
    assert not isinstance(found, ConfigError), found
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    show = partial(tokenizer.decode, skip_special_tokens=False)
    return [(show(list(tokens)), show(list(tokens[is_spoken]))) for tokens, is_spoken in found.rows]


def test_answers_are_found_in_the_whole_text(tmp_path: Path) -> None:
    """Two turns are one row; each answer is trained with the token that ends its turn."""
    rows = rows_of(folder_of(tmp_path, HEADERS), two_turns())
    assert [trained for _, trained in rows] == ["One<|end|>Two<|end|>"]


def test_an_answer_that_is_rewritten_later_has_a_row_of_its_own(tmp_path: Path) -> None:
    """The first row is what the model sees when it gives the first answer; each thought is trained once."""
    rows = rows_of(folder_of(tmp_path, LONG_TURNS), two_turns(reasoning_content="Hm"))
    first = "<|start|>you\nHi<|start|>bot\n<think>Hm</think>One<|start|>"
    assert rows[0] == (first, "Hm</think>One<|start|>")
    assert rows[1][0].startswith("<|start|>you\nHi<|start|>bot\nOne<|start|>you\nBye")
    assert rows[1][1] == "Hm</think>Two<|start|>"


def test_a_conversation_that_is_too_long_for_a_text_of_each_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each text has all that was said before it."""
    monkeypatch.setattr("headway.daemon.text.chat_mask.MAX_CHARACTERS", 50)
    folder = folder_of(tmp_path, LONG_TURNS)
    with pytest.raises(ConfigError, match=r"line 7: is too long for a text of each answer, .*; split it into shorter"):
        text_of(encoder_of(folder), folder, two_turns(reasoning_content="Hm"))


@pytest.mark.parametrize(
    ("last", "at"),
    [
        ("messages | length", lambda turn: 2 * turn + 4),
        ("loop.index % 6", lambda turn: (2 * turn + 4) % 6),
        ("messages | selectattr('content', 'equalto', 'far') | list | length", lambda _turn: 1),
    ],
)
def test_what_a_template_writes_for_the_last_message_alone_may_follow_from_the_first(
    tmp_path: Path, last: str, at: Callable[[int], int]
) -> None:
    """Each answer of a long conversation is trained as it stands in a rendering of all that was said before it."""
    noted = "{% if loop.last %}{{ " + last + " }} {% endif %}"
    folder = folder_of(tmp_path, HEADERS.replace("{{ m['content']", noted + "{{ m['content']"))
    turns = [each for turn in range(80) for each in asked(f"answer {turn}")]
    rows = rows_of(folder, [{"role": "user", "content": "far"}, turns[1], *turns])
    assert [trained for _, trained in rows][1:] == [f"{at(turn)} answer {turn}<|end|>" for turn in range(80)]


def test_a_conversation_of_too_many_messages_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a conversation grows with the square of its messages."""
    monkeypatch.setattr("headway.daemon.text.chat_mask.MAX_MESSAGES", 3)
    folder = folder_of(tmp_path, HEADERS)
    with pytest.raises(ConfigError, match="line 7: has more than 3 messages; split it into shorter conversations"):
        text_of(encoder_of(folder), folder, two_turns())


def test_a_call_that_the_template_leaves_out_is_no_answer(tmp_path: Path) -> None:
    """An empty answer is not trained in place of a tool call: the record is named."""
    folder = folder_of(tmp_path, HEADERS)
    with pytest.raises(ConfigError, match="line 7: the chat template leaves out that message 2 calls sum; name a"):
        text_of(encoder_of(folder), folder, asked(None, tool_calls=[CALL]))


def test_thoughts_that_a_template_never_renders_follow_its_prompt(tmp_path: Path) -> None:
    """DeepSeek-R1's template asks for a thought and drops it: each answer is trained after the prompt for it, last."""
    template = LONG_TURNS.replace("{% if loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}", "")
    messages = two_turns()
    messages[3]["reasoning_content"] = "Hm <|end|>"
    rows = rows_of(folder_of(tmp_path, template), messages)
    assert [trained for _, trained in rows] == ["One<|start|>", "Hm <|end|>\n</think>\n\nTwo<|start|>"]
    assert rows[1][0].startswith("<|start|>you\nHi<|start|>bot\nOne<|start|>you\nBye<|start|>bot\n<think>Hm <|end|>\n")


def test_a_note_that_a_template_makes_up_is_one_line(tmp_path: Path) -> None:
    """A template may write the code points with which its loops are followed."""
    folder = folder_of(tmp_path, HEADERS + '{{ "\\ufdd2\\ufdd9\\ufdd9\\ufdd3" }}')
    with pytest.raises(ConfigError, match="line 7: the chat template cannot be followed: it has a note that no loop"):
        text_of(encoder_of(folder), folder, asked("x"))
