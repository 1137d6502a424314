"""The token shards of a few texts, conversations and pairs, in each form of file, and what is said of bad records."""

import bz2
import csv
import gzip
import json
import lzma
import tempfile
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from headway.daemon.base.errors import ConfigError
from headway.daemon.text.preparation import Preparation
from headway.daemon.text.prepare import prepare
from tests.rigs.tiny_chats import TEMPLATE, write_chat_tokenizer

TEXTS = ["Grüße,\nWelt\n", "second <|end|> document", "", " a\ttab, a \"quote\" and 'another' " * 40]
USER, ANSWER = {"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "It is 4"}
MORE = [{"role": "system", "content": "Be brief"}, USER, ANSWER, {"role": "user", "content": "Sure? <|end|>"}, ANSWER]
CALL = {"name": "add", "arguments": {"a": 2}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}
CHATS: list[Any] = [
    {"messages": [USER, ANSWER]},
    {"messages": MORE},
    {"messages": [USER, CALLED, {"role": "tool", "content": "4"}, ANSWER], "tools": [TOOL]},
    {"messages": [USER, {**ANSWER, "reasoning_content": "two and two"}, USER, ANSWER]},
    {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}], "system": "Be brief"},
    {"prompt": "2+2?", "completion": "4"},
    {"prompt": [USER], "completion": [ANSWER]},
    {"instruction": "Add", "input": "2 and 2", "output": "4", "history": [["1+1?", "2"]]},
    {"question": "2+2?", "answer": "4"},
    {"messages": [USER, {"role": "assistant", "content": None, "function_call": CALL}]},
    {"messages": [USER, {**ANSWER, "weight": 0}]},
    {"messages": []},
    {"messages": ["x"]},
    {"text": "x"},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "parts"}]}, ANSWER]},
    {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}, ANSWER]},
    {"messages": [USER]},
    {"prompt": "2+2?", "completion": "5", "label": False},
    7,
]
PAIRS: list[Any] = [
    {"prompt": "2+2?", "chosen": "It is 4", "rejected": "It is 5, so long"},
    {"prompt": [MORE[0], USER], "chosen": [ANSWER], "rejected": [{"role": "assistant", "content": "there"}]},
    {"chosen": [USER, ANSWER], "rejected": [USER, {"role": "assistant", "content": "No"}]},
    {"input": {"messages": [USER]}, "preferred_output": [ANSWER], "non_preferred_output": [CALLED]},
    {"prompt": "2+2?", "chosen": "It is 4", "rejected": "It is 4"},
    {"prompt": "2+2?", "chosen": "It is 4"},
    {"chosen": "It is 4", "rejected": "no"},
]
CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "marked": TEMPLATE,
    "chatml": CHATML,
    "trimmed": CHATML.replace("m.content }}", "m.content | trim }}"),
    "late system": "{% if messages[0].role == 'system' %}[{{ messages[0].content }}]{% endif %}"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}"
    "{{ bos_token }}[INST] {{ m.content }} [/INST]"
    "{% elif m.tool_calls %} {{ m.tool_calls[0].function | tojson }}{{ eos_token }}"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
    "thoughts": "{% for m in messages %}<|start|>{{ m.role }}\n{% if m.reasoning_content and loop.last %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}",
    "strict": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}",
    "date": "{{ strftime_now('%d %b %Y') }}" + CHATML,
}


def record() -> dict[str, str]:
    """What each source becomes: the digest of the shards and their counts, or what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        found = {f"text, {name}": _made(place, write) for name, write in _FILES.items()}
        for options in (
            {"flags": True, "validation": 0.5, "seed": 3},
            {"pack": 32},
            {"max_tokens": 30},
            {"binary": True},
            {"special_tokens": True},
            {"no_bos": True},
        ):
            found[f"text, {options}"] = _made(place, _lines(TEXTS), tokenizer="chatml", **options)
        for name in TEMPLATES:
            for options in ({}, {"pack": 300, "validation": 0.3}, {"special_tokens": True}):
                wanted = {"chat": True, "max_bad": 99, **options}
                found[f"chats, {name}, {options}"] = _made(place, _lines(CHATS), tokenizer=name, **wanted)
            for number, chat in enumerate(CHATS):
                found[f"chat {number}, {name}"] = _made(place, _lines([chat]), tokenizer=name, chat=True)
            pairs = {"chat": True, "pairs": True, "pack": 200, "max_bad": 99}
            found[f"pairs, {name}"] = _made(place, _lines(PAIRS), tokenizer=name, **pairs)
        for number, pair in enumerate(PAIRS):
            found[f"pair {number}"] = _made(place, _lines([pair]), tokenizer="chatml", chat=True, pairs=True, pack=200)
        found["chats in parquet"] = _made(place, _parquet_chats, tokenizer="chatml", chat=True)
    return found


def _made(place: Path, write: Callable[[Path], Path], *, tokenizer: str = "bytes", **options: Any) -> str:
    with tempfile.TemporaryDirectory(dir=place) as name:
        folder = Path(name)
        if tokenizer != "bytes":
            write_chat_tokenizer(folder / "tokenizer")
            (folder / "tokenizer/chat_template.jinja").write_text(TEMPLATES[tokenizer])
            tokenizer = str(folder / "tokenizer")
        said: list[str] = []
        try:
            source = str(write(folder))
            done = prepare(
                [source],
                folder / "out",
                Preparation(**{"max_bad": 0, "tokenizer": tokenizer, **options}),
                warn=said.append,
            )
        except ConfigError as error:
            return str(error).replace(name, "")
        splits = [astuple(done.train), astuple(done.validation)]
        counts = [done.index.sha256, *splits, done.num_bad, sorted(done.bad_kinds.items())]
        return repr([*counts, sorted(done.noted.items()), done.begin_of_text, said]).replace(name, "")


def _lines(records: list[Any]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        given = [{"text": each} if isinstance(each, str) else each for each in records]
        (folder / "in.jsonl").write_text("".join(json.dumps(each) + "\n" for each in given))
        return folder / "in.jsonl"

    return write


def _in(name: str, content: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def _table(delimiter: str, name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        with (folder / name).open("w", newline="") as file:
            csv.writer(file, delimiter=delimiter).writerows([["id", "text"], *enumerate(TEXTS)])
        return folder / name

    return write


def _parquet(folder: Path) -> Path:
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS, "id": [1, 2, 3, 4]}), folder / "in.parquet")
    return folder / "in.parquet"


def _parquet_chats(folder: Path) -> Path:
    table = pyarrow.table({"messages": [CHATS[0]["messages"], MORE]})
    pyarrow.parquet.write_table(table, folder / "in.parquet", row_group_size=1)
    return folder / "in.parquet"


def _arrow(folder: Path) -> Path:
    table = pyarrow.table({"text": TEXTS})
    with pyarrow.OSFile(str(folder / "in.arrow"), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return folder / "in.arrow"


def _folder(folder: Path) -> Path:
    (folder / "in").mkdir()
    for name, text in zip(["c.txt", "a.md", "README.md", ".hidden"], TEXTS, strict=True):
        (folder / "in" / name).write_text(text)
    return folder / "in"


_LINES = "".join(json.dumps({"text": each}) + "\n" for each in TEXTS).encode()
_FILES: dict[str, Callable[[Path], Path]] = {
    "plain": _in("in.txt", "".join(TEXTS).encode()),
    "with a mark of its order": _in("in.txt", "\ufeffGrüße".encode()),
    "in UTF-16": _in("in.txt", "Grüße".encode("utf-16")),
    "in Latin-1": _in("in.txt", "Grüße".encode("latin-1")),
    "json lines": _lines(TEXTS),
    "one json": _in("in.json", json.dumps([{"text": each} for each in TEXTS]).encode()),
    "gzip": _in("in.jsonl.gz", gzip.compress(_LINES)),
    "xz": _in("in.jsonl.xz", lzma.compress(_LINES)),
    "bz2": _in("in.jsonl.bz2", bz2.compress(_LINES)),
    "torn gzip": _in("in.jsonl.gz", gzip.compress(_LINES)[:-9]),
    "torn json": _in("in.jsonl", _LINES + b'{"text": '),
    "csv": _table(",", "in.csv"),
    "tsv": _table("\t", "in.tsv"),
    "parquet": _parquet,
    "arrow": _arrow,
    "folder": _folder,
    "a zip": _in("in.zip", b"PK\x03\x04rest"),
    "empty": _in("in.txt", b""),
    "nothing": lambda folder: folder / "none",
}
