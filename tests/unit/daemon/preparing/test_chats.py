"""Conversations become tokens by the tokenizer's own chat template; only what the assistant says is a target."""

import json
import resource
import signal
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from headway.daemon.data import chat_template, template_limits
from headway.daemon.data.chat_mask import spoken_tokens
from headway.daemon.data.chat_template import sandbox
from headway.daemon.data.documents import Conversation
from headway.daemon.errors import ConfigError
from headway.daemon.preparing.preparation import Preparation
from headway.daemon.preparing.prepare import prepare
from headway.stages.data.tokens import TokenShards

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant\n"
    "{% generation %}{{ m.content }}<|end|>{% endgeneration %}\n"
    "{% else %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
)
DOUBLED = (
    "{% set held = namespace(text=messages[0].content) %}"
    "{% for a in range(99) %}{% set held.text = held.text OP held.text %}{% endfor %}"
)
CHATS = [
    [("user", "Hi there"), ("assistant", "Hello, ça va?"), ("user", "Bye"), ("assistant", "So long")],
    [("system", "Be brief"), ("user", "2+2?"), ("assistant", "4")],
    [("user", "no answer")],
]


def folder_of(tmp_path: Path, template: str | None, *, in_file: bool = True) -> Path:
    """A tokenizer's folder: bytes, a few merges, and three special tokens."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    special = ["<|start|>", "<|end|>", "<s>"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=280, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["Hello there, so long, assistant user"] * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {"eos_token": "<|end|>", "bos_token": {"content": "<s>"}}
    if template is not None and in_file:
        (folder / "chat_template.jinja").write_text(template)
    elif template is not None:
        config["chat_template"] = [{"name": "tools", "template": "x"}, {"name": "default", "template": template}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def messages_of(chat: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in chat]


def prepared(tmp_path: Path, folder: Path, records: list[Any]) -> tuple[list[int], list[int]]:
    """The tokens and the flags of records."""
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    prepare([str(tmp_path / "in.jsonl")], tmp_path / "out", Preparation(tokenizer=str(folder), chat=True))
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
        ("{{ messages[0].content * 20000000 }}", {"messages": []}, "line 1: .* longer than 16 Mi characters"),
        ("{{ 'a' * 100000000000 }}", {"messages": []}, "line 1: .* longer than 16 Mi characters"),
        (f"{{{{ {1 << 1000} * {1 << 1000} }}}}", {"messages": []}, "line 1: .* more than 1024 bits"),
        ("{{ 9 ** 9 ** 9 ** 9 }}", {"messages": []}, "line 1: .* raises to a power"),
        (DOUBLED.replace("OP", "+"), {"messages": []}, "line 1: .* more than 1 GiB of memory"),
        (DOUBLED.replace("OP", "~"), {"messages": []}, "line 1: .* more than 1 GiB of memory"),
        ("{{ 'x'.center(30000000000) }}", {"messages": []}, "line 1: .* more than 1 GiB of memory"),
        ("{% for", {"messages": []}, "its chat template is invalid"),
        ("x" * ((1 << 20) + 1), {"messages": []}, "its chat template has more than 1048576 characters"),
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


def test_a_template_without_an_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nested loops that emit nothing are stopped at the limit of time."""
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.1)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ConfigError, match=r"line 1: .* takes longer than"):
        prepared(tmp_path, folder_of(tmp_path, endless), [{"messages": messages_of(CHATS[0])}])


def test_a_template_without_an_end_ends_the_preparation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After three records, however many may be bad: each of a hundred would cost 20 s."""
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.1)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (tmp_path / "in.jsonl").write_text((json.dumps({"messages": messages_of(CHATS[0])}) + "\n") * 9)
    options = Preparation(tokenizer=str(folder_of(tmp_path, endless)), chat=True, max_bad=100)
    with pytest.raises(
        ConfigError, match=r"line 3: .* takes longer than .*, as for 2 records before; name a tokenizer"
    ):
        prepare([str(tmp_path / "in.jsonl")], tmp_path / "out", options)


def test_a_constant_without_an_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """jinja2 computes a constant expression while it compiles: the limit of time is in force there too."""
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.1)
    endless = "{{ ([1]|slice(99999999))|first }}{{ [1]|slice(9999999)|list|length }}"
    with pytest.raises(ConfigError, match=r"takes longer than"):
        prepared(tmp_path, folder_of(tmp_path, endless), [{"messages": messages_of(CHATS[0])}])


def test_a_limit_of_memory_ends_with_the_rendering(tmp_path: Path) -> None:
    """After a refused template, the process has its own limit again."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(ConfigError, match="GiB of memory"):
        prepared(tmp_path, folder_of(tmp_path, DOUBLED.replace("OP", "~")), [{"messages": messages_of(CHATS[0])}])
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_signals_that_come_again_and_again_leave_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come while a template is ended, too: it is still one line, and memory and time are free again."""
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.003)
    monkeypatch.setattr(template_limits, "AGAIN_S", 0.0002)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)
    template = object.__new__(chat_template.ChatTemplate)
    environment = sandbox(today=date(2026, 1, 1), mark=str)
    template._special, template._template = {}, environment.from_string(endless)
    for _ in range(100):
        with pytest.raises(ConfigError, match=r"takes longer than"):
            template.render(Conversation(messages=[], tools=None, where="line 1"), [])
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)) == before


def test_a_late_signal_leaves_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes as the limit is taken back."""
    before, set_timer = signal.getsignal(signal.SIGALRM), signal.setitimer

    def with_signal(which: int, seconds: float, interval: float = 0.0) -> tuple[float, float]:
        handler = signal.getsignal(signal.SIGALRM)
        if seconds == 0 and callable(handler):
            handler(signal.SIGALRM, sys._getframe(1))
        return set_timer(which, seconds, interval)

    monkeypatch.setattr(signal, "setitimer", with_signal)
    with template_limits.limited_time():
        pass
    assert signal.getsignal(signal.SIGALRM) == before


def test_a_token_that_reaches_over_the_begin_of_an_answer_counts() -> None:
    """A token is a target if any of its characters is spoken; offsets may leave out a space before it."""
    offsets = [(0, 4), (5, 9), (9, 10)]  # the second token begins at 4: its offsets leave out a space
    assert spoken_tokens(offsets, [(4, 9)]).tolist() == [False, True, False]
    assert spoken_tokens(offsets, [(5, 9)]).tolist() == [False, True, False]
    assert spoken_tokens(offsets, [(3, 9)]).tolist() == [True, True, False]
