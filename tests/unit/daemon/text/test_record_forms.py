"""Files and records as people have them: recognised, and said, or refused with what to do."""

import csv
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.text import record_files
from headway.daemon.text.documents import BadRecord, Conversation
from headway.daemon.text.preparation import Preparation
from headway.daemon.text.prepare import prepare
from headway.daemon.text.records import Field
from headway.daemon.text.text_sources import open_sources
from tests.rigs.tiny_chats import write_chat_tokenizer

USER, ANSWER = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Be brief"}
CALL = {"name": "add", "arguments": {"a": 2}}
RECORDS = [{"text": "Grüße,\nWelt", "id": 1}, {"text": "second", "id": 2}, {"text": "", "id": 3}]


def chats(source: Path | str, field: str = "") -> list[Conversation | BadRecord]:
    """The conversations of a source."""
    found: list[Any] = []
    for each in open_sources(str(source), field=Field(field, is_chat=True)):
        for document, _ in each.documents():
            found += [document] if isinstance(document, BadRecord) else document
    return found


def texts(source: Path | str) -> list[str]:
    """The texts of a source."""
    found = []
    for each in open_sources(str(source), field=Field()):
        for document, _ in each.documents():
            assert not isinstance(document, BadRecord), document
            found.append(b"".join(piece for piece in document if isinstance(piece, bytes)).decode())
    return found


def written(path: Path, records: list[Any]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    ("record", "messages", "form"),
    [
        ({"messages": [USER, ANSWER]}, [USER, ANSWER], ""),
        ({"conversations": [USER, ANSWER]}, [USER, ANSWER], ""),
        (
            {
                "conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}],
                "system": "Be brief",
            },
            [SYSTEM, USER, ANSWER],
            "ShareGPT (from + value)",
        ),
        (
            {"messages": [{"from": "function_call", "value": json.dumps(CALL)}, {"from": "observation", "value": "4"}]},
            [
                {"role": "assistant", "tool_calls": [{"type": "function", "function": CALL}]},
                {"role": "tool", "content": "4"},
            ],
            "ShareGPT (from + value)",
        ),
        ({"messages": [{**USER, "role": "Human"}, {**ANSWER, "role": "model"}]}, [USER, ANSWER], ""),
        (
            {"messages": [USER, {"role": "assistant", "content": None, "function_call": CALL}]},
            [
                USER,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"type": "function", "function": CALL}],
                },
            ],
            "",
        ),
        ({"prompt": "2+2?", "completion": "4"}, [USER, ANSWER], "prompt + completion"),
        ({"prompt": [SYSTEM, USER], "completion": [ANSWER]}, [SYSTEM, USER, ANSWER], "prompt + completion"),
        (
            {"instruction": "Add", "input": "2, 2", "output": "4"},
            [{"role": "user", "content": "Add\n\n2, 2"}, ANSWER],
            "instruction + output",
        ),
        (
            {"instruction": "2+2?", "input": "", "output": "4", "history": [["1+1?", "2"]], "system": "Be brief"},
            [SYSTEM, {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}, USER, ANSWER],
            "instruction + output",
        ),
        (
            {"instruction": "Add", "context": "2, 2", "output": "4"},
            [{"role": "user", "content": "Add\n\n2, 2"}, ANSWER],
            "instruction + output",
        ),
        ({"question": "2+2?", "answer": "4"}, [USER, ANSWER], "question + answer"),
        (
            {"instruction": "2+2?", "context": "", "response": "4", "category": "qa"},
            [USER, ANSWER],
            "instruction + response",
        ),
    ],
)
def test_a_conversation_is_known_by_its_columns(tmp_path: Path, record: Any, messages: Any, form: str) -> None:
    """From JSON lines and from parquet, where other rows have more columns that this one has as nulls."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    where = str(tmp_path / "in.jsonl") + ", line 1"
    found = chats(written(tmp_path / "in.jsonl", [record]))
    assert found == [Conversation(messages=messages, tools=None, where=where, form=form)]
    parquet.write_table(arrow.Table.from_pylist([record]), tmp_path / "in.parquet")
    (of_table,) = chats(tmp_path / "in.parquet")
    assert isinstance(of_table, Conversation)
    assert (of_table.messages, of_table.form) == (messages, form)


@pytest.mark.parametrize("answer", [{**ANSWER, "weight": 0}, {"from": "gpt", "value": "4", "weight": 0}])
def test_an_answer_that_is_not_to_be_trained_leaves_its_record_out(tmp_path: Path, answer: Any) -> None:
    """OpenAI's `weight`, which other messages may have: no answer is trained on that the file says is wrong."""
    records = [{"messages": [{**USER, "weight": 0}, said]} for said in (answer, {**ANSWER, "weight": 1})]
    found = chats(written(tmp_path / "in.jsonl", records))
    assert isinstance(found[0], BadRecord)
    assert "message 2 has the weight 0, but every answer is trained on; end the record before it" in str(found[0])
    assert isinstance(found[1], Conversation)


def test_a_row_without_tools_has_none_beside_one_that_has(tmp_path: Path) -> None:
    """Arrow fills tools, tool_calls and their arguments with nulls: no message of another row shows them."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}]
    other = [{"type": "function", "function": {"name": "say", "arguments": {"b": "x"}}}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "int"}}}}}]
    called = {"role": "assistant", "content": None, "tool_calls": calls}
    records: list[dict[str, Any]] = [
        {"messages": [USER, ANSWER], "tools": None},
        {"messages": [USER, called, {"role": "assistant", "content": "x", "tool_calls": other}], "tools": tools},
    ]
    parquet.write_table(arrow.Table.from_pylist(records), tmp_path / "in.parquet")
    (plain, with_tools) = chats(tmp_path / "in.parquet")
    assert isinstance(plain, Conversation)
    assert isinstance(with_tools, Conversation)
    assert (plain.messages, plain.tools) == ([USER, ANSWER], None)
    assert (with_tools.messages, with_tools.tools) == (records[1]["messages"], tools)


def test_tools_and_messages_may_be_json_in_a_text(tmp_path: Path) -> None:
    """The only way in a table of texts; each tool, too."""
    (tmp_path / "in.csv").write_text('messages,tools\n"' + json.dumps([USER, ANSWER]).replace('"', '""') + '",[]\n')
    records: list[dict[str, Any]] = [
        {"messages": [USER, ANSWER], "tools": tools} for tools in (json.dumps([CALL]), [json.dumps(CALL)])
    ]
    records.append({"messages": [USER, ANSWER], "functions": [CALL]})
    found = [*chats(tmp_path / "in.csv"), *chats(written(tmp_path / "in.jsonl", records))]
    assert [each.messages for each in found if isinstance(each, Conversation)] == [[USER, ANSWER]] * 4
    tools = [each.tools for each in found if isinstance(each, Conversation)]
    assert tools == [None, [CALL], [CALL], [{"type": "function", "function": CALL}]]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"turns": [USER], "id": 1}, r"it has turns, id: --field turns takes them from there"),
        ({"data": ["2+2?", "4"], "id": 1}, "it has data, id: write `messages`, a list of role"),
        ({"messages": [], "id": 1}, "has no message in 'messages'; drop the record"),
        ({"messages": [USER, ANSWER], "tools": 5}, "has tools that are no list of tables"),
        ({"messages": [USER, ANSWER], "tools": ["5"]}, "has tools that are no list of tables"),
        (
            {"prompt": "2+2?", "completion": "5", "label": False},
            "has the label false, so its completion is a bad answer",
        ),
        ({"prompt": "2+2?", "chosen": ["4"], "rejected": ["5"]}, "prompt, chosen, rejected: --pairs reads these"),
        ({"query": "2+2?", "answers": "4"}, r"in a known form \(messages, conversations, prompt \+ completion"),
        ({"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}, "has answers in its prompt, .* as `messages`"),
        ({"messages": "no json"}, "are a text, and not JSON"),
        ({"instruction": "a", "output": "b", "history": ["a"]}, "has a history that is no list of pairs"),
        (
            {"instruction": "a", "output": "b", "input": "c", "context": "d"},
            "has instruction and input or context that",
        ),
        ({"instruction": "a", "output": "b", "history": 5}, "has a history that is no list of pairs"),
        (
            {"instruction": "a", "output": "b", "input": ["c"]},
            "has instruction and input or context that are not one text each",
        ),
        ("text", "is no table"),
    ],
)
def test_another_form_is_refused_with_what_to_do(tmp_path: Path, record: Any, reason: str) -> None:
    """The field that takes it, or what it may be written as."""
    (found,) = chats(written(tmp_path / "in.jsonl", [record]))
    assert isinstance(found, BadRecord)
    assert __import__("re").search(reason, found.what), found.what


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"prompt": "a", "completion": "b"}, r"conversations need --chat --tokenizer FOLDER \(it has prompt and comp"),
        ({"body": "a", "id": 1}, "it has body: name one with --field"),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
def test_a_record_without_text_says_which_option_reads_it(
    tmp_path: Path, record: dict[str, Any], reason: str, kind: str
) -> None:
    """Of a table, the first row says it, so that no line is left out first."""
    source = written(tmp_path / f"in.{kind}", [record])
    if kind == "csv":
        source.write_text(",".join(record) + "\n" + ",".join(map(str, record.values())) + "\n")
        reason = reason if "chat" in reason else "has no column 'text'; there are body, id"
    with pytest.raises(ConfigError, match=reason):
        prepare([str(source)], tmp_path / "out")


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("is_array", [True, False])
def test_a_json_file_gives_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indent: int | None, is_array: bool
) -> None:
    """One array, or one value after the other, on one line or on several; read in blocks of any size."""
    monkeypatch.setattr(record_files, "_BLOCK_BYTES", 3)
    parts = [json.dumps(record, indent=indent, ensure_ascii=False) for record in RECORDS]
    text = f"[{','.join(parts)}]\n" if is_array else "\n".join(parts)
    (tmp_path / "in.json.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + text.encode()))
    assert texts(tmp_path / "in.json.gz") == [record["text"] for record in RECORDS]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('[{"text": "a"},\n{"text": "b"}', "line 2: ends inside its array"),
        ('[{"text": "a"},\n{"text": "b', "line 2: ends inside a value"),
        (
            '{"text": "a"}\n{"text" "b"}' + " " * 100,
            r"line 2: is not JSON: Expecting ':' delimiter; lines in a \.jsonl",
        ),
        ("[" * 100_000 + " " * 100, "line 1: is not JSON that can be read: it is too deep"),
        ('[{"text": "a"}] {"text": "b"} x' + " " * 100, "line 1: is not JSON"),
    ],
)
def test_a_damaged_json_file_is_one_line(tmp_path: Path, content: str, reason: str) -> None:
    """The rest of it cannot be found, so it is not left out in silence."""
    (tmp_path / "in.json").write_text(content)
    with pytest.raises(ConfigError, match=reason):
        prepare([str(tmp_path / "in.json")], tmp_path / "out", Preparation(max_bad=100))


@pytest.mark.parametrize(("kind", "separator"), [("csv", ","), ("csv", ";"), ("tsv", "\t")])
def test_a_table_gives_its_column(tmp_path: Path, kind: str, separator: str) -> None:
    """Quoted line ends are text, the first row says what separates, and a byte-order mark is no part of a name."""
    with (tmp_path / f"in.{kind}").open("w", encoding="utf-8-sig", newline="") as file:
        table = csv.DictWriter(file, ["text", "id"], delimiter=separator)
        table.writeheader()
        table.writerows(RECORDS)
    assert texts(tmp_path / f"in.{kind}") == [record["text"] for record in RECORDS]


@pytest.mark.parametrize(
    "content",
    ['{"text": "a"},\n\n{"text": "b"},\n', '\n[\n{"text": "a"},\n{"text": "b"}]', '[{"text":"a"},{"text":"b"}]'],
)
def test_lines_with_commas_and_an_array_are_records(tmp_path: Path, content: str) -> None:
    """Whatever the name of the file says: no record is lost."""
    (tmp_path / "in.jsonl").write_text(content)
    assert texts(tmp_path / "in.jsonl") == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"text": "a",}', "line 1: is not JSON: .* at character 1[34]"),
        ('{"text": "ü"}'.encode("cp1252"), "line 1: is not UTF-8 text: convert it, for example with `iconv"),
    ],
)
def test_a_line_that_is_no_json_says_why(tmp_path: Path, content: bytes, reason: str) -> None:
    """The place, or what converts the file."""
    (tmp_path / "in.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        prepare([str(tmp_path / "in.jsonl")], tmp_path / "out")


def test_a_feather_file_is_an_arrow_file(tmp_path: Path) -> None:
    """As pandas writes it, compressed."""
    arrow, feather = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.feather")
    feather.write_feather(arrow.table({"text": ["a", "b"]}), tmp_path / "in.feather")
    assert texts(tmp_path / "in.feather") == ["a", "b"]


def test_a_column_that_stands_twice_is_refused(tmp_path: Path) -> None:
    """Neither of them is meant; another column may stand twice."""
    (tmp_path / "in.csv").write_text("text,id,id\na,1,2\n")
    assert texts(tmp_path / "in.csv") == ["a"]
    (tmp_path / "in.csv").write_text("text,id,text\na,1,b\n")
    with pytest.raises(ConfigError, match=r"in\.csv: has two columns named 'text'; rename one of them"):
        texts(tmp_path / "in.csv")


def test_a_zero_character_in_a_record_is_no_end_of_a_document(tmp_path: Path) -> None:
    """For the tokenizer of bytes it would be one: the record is named, as a file of text with a zero byte is."""
    with pytest.raises(ConfigError, match="line 1: has a zero character in the field 'text'; remove it"):
        prepare([str(written(tmp_path / "in.jsonl", [{"text": "a\0b"}]))], tmp_path / "out")


@pytest.mark.parametrize("is_pair", [True, False])
def test_a_record_of_any_depth_is_used_or_named(tmp_path: Path, is_pair: bool) -> None:
    """Parsing it, choosing whether it is held out and rendering it stop at depths of their own."""
    said = [
        f'[{{"role": "user", "content": "a", "about": DEEP}}, {{"role": "assistant", "content": "{answer}"}}]'
        for answer in "bc"
    ]
    record = f'{{"chosen": {said[0]}, "rejected": {said[1]}}}' if is_pair else f'{{"messages": {said[0]}}}'
    deep = ["0", "1", "3", *("[" * depth + "]" * depth for depth in range(800, 1000))]
    (tmp_path / "in.jsonl").write_text("".join(record.replace("DEEP", each) + "\n" for each in deep))
    write_chat_tokenizer(tmp_path / "model")
    options = Preparation(
        tokenizer=str(tmp_path / "model"), chat=True, pairs=is_pair, pack=200, validation=0.5, max_bad=999
    )
    found = prepare([str(tmp_path / "in.jsonl")], tmp_path / "out", options)
    assert 0 < found.num_bad <= 200
    assert found.num_bad + found.train.documents + found.validation.documents == len(deep)


def test_a_row_of_another_length_is_left_out(tmp_path: Path) -> None:
    """With the line at which it begins."""
    (tmp_path / "in.csv").write_text('text,id\n"a\nb",1\nc\nd,2\n')
    warnings: list[str] = []
    prepare([str(tmp_path / "in.csv")], tmp_path / "out", Preparation(max_bad=1), warn=warnings.append)
    assert (tmp_path / "out" / "shard-00000.bin").read_bytes() == b"a\nb\0d\0"
    assert "line 4: has 1 fields, and the first row has 2" in warnings[0]


def test_a_quotation_without_an_end_takes_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of the rest of the file."""
    monkeypatch.setattr(record_files, "MAX_RECORD_BYTES", 100)
    (tmp_path / "in.csv").write_text('text\n"a\n' + "b\n" * 100)
    with pytest.raises(ConfigError, match=r"line 2: .* larger than field limit .*; is a quotation mark missing\?"):
        prepare([str(tmp_path / "in.csv")], tmp_path / "out")


def test_a_folder_is_read_but_for_what_is_about_it(tmp_path: Path) -> None:
    """Nested folders and several kinds in the order of their paths; hidden files and a README are passed over."""
    folder = tmp_path / "in"
    for name in ("b/c.txt", "b/README.md", "a.txt", ".git/config", ".DS_Store", "LICENSE"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    written(folder / "c.jsonl", [{"text": "c.jsonl"}])
    said: list[str] = []
    prepare([str(folder)], tmp_path / "out", warn=said.append)
    assert (tmp_path / "out" / "shard-00000.bin").read_bytes() == b"a.txt\0b/c.txt\0c.jsonl\0"
    assert said == [
        f"{folder}: passes over .DS_Store, .git/config, LICENSE, b/README.md: hidden, or about the folder; name a file"
        " to read it",
        f"{folder}: has files of several kinds: 1 .jsonl, 2 text",
    ]
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "README.md").write_text("text")
    assert texts(tmp_path / "only") == ["text"]


def test_a_folder_with_splits_gives_one_of_them(tmp_path: Path) -> None:
    """As the Hub names their files; a file of no split is read too, and a pattern takes what it names."""
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001", "more"):
        written(tmp_path / "in" / f"{name}.jsonl", [{"text": name}])
    said: list[str] = []
    (found,) = (open_sources(str(tmp_path / "in"), field=Field(), tell=said.append),)
    assert [Path(each.name).stem[:8] for each in found] == ["more", "train-00", "train-00"]
    assert said == [
        f"{tmp_path / 'in'}: takes the split train, and leaves out test; --split or a pattern of names takes others"
    ]
    assert len(open_sources(str(tmp_path / "in" / "*"), field=Field())) == 4
    with pytest.raises(ConfigError, match="has no split 'dev'; there are test, train: name one with --split"):
        open_sources(str(tmp_path / "in"), field=Field(), split="dev")


def test_a_pattern_names_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in nested folders; each file once, by path; one that matches nothing is refused; names may have marks."""
    for name in ("in/b.txt", "in/a.txt", "in/deep/c.txt", "in/d.md", "in/[1].txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.chdir(tmp_path)
    assert texts("in/?.txt") == ["in/a.txt", "in/b.txt"]
    assert texts("in/**/*.txt") == ["in/[1].txt", "in/a.txt", "in/b.txt", "in/deep/c.txt"]
    assert texts("in/[1].txt") == ["in/[1].txt"]
    assert sorted(texts(str(tmp_path / "in" / "**"))) == sorted(
        ["in/[1].txt", "in/a.txt", "in/b.txt", "in/d.md", "in/deep/c.txt"]
    )
    with pytest.raises(ConfigError, match=r"in/\*\.csv: no file has such a name"):
        texts("in/*.csv")


def test_a_text_among_conversations_is_refused(tmp_path: Path) -> None:
    """It would be trained as a whole."""
    (tmp_path / "in.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"in\.txt: is a text, and conversations are in \.jsonl, .*\.parquet"):
        chats(tmp_path / "in.txt")


def test_a_name_that_is_no_utf8_is_escaped(tmp_path: Path) -> None:
    """In the index, which is JSON, and so in what names its source."""
    folder = tmp_path / os.fsdecode(b"in \xff")
    folder.mkdir()
    (folder / os.fsdecode(b"a\xfe.txt")).write_text("text")
    index = prepare([str(folder)], tmp_path / os.fsdecode(b"out\xfe")).index
    assert index.provenance == str(tmp_path / "in \\udcff")
    assert index.num_tokens == 5
