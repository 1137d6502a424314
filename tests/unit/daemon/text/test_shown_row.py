"""`headway data show`: the text of a row, what is trained in it, and how many targets each document has."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.cli.program import run as headway
from headway.daemon.text.preparation import Preparation
from headway.daemon.text.prepare import prepare
from headway.daemon.text.shown_row import WINDOW_TOKENS, read_row

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from tests.rigs.tiny_chats import write_chat_tokenizer, write_chats


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Rows of a few conversations each."""
    write_chat_tokenizer(tmp_path / "model")
    write_chats(tmp_path / "chats.jsonl", count=9)
    options = Preparation(tokenizer=str(tmp_path / "model"), chat=True, pack=200)
    prepare([str(tmp_path / "chats.jsonl")], tmp_path / "data", options)
    return tmp_path / "data"


def test_a_row_shows_its_targets_and_special_tokens(chats: Path) -> None:
    """The parts make up the row; targets are the answers with their ends, counted for each document."""
    row = read_row(chats, 1)
    text = "".join(part.text for part in row.parts if part.is_target)
    assert text.startswith("It is ")
    assert text.endswith(".<|end|>")
    assert text.count("It is") == len(row.documents)
    special = "".join(part.text for part in row.parts if part.is_special and not part.is_padding)
    assert special.replace("<|start|>", "").replace("<|end|>", "") == ""
    assert special.count("<|end|>") == 2 * len(row.documents)
    assert sum(part.num_tokens for part in row.parts) == 201
    targets = sum(part.num_tokens for part in row.parts if part.is_target)
    assert targets == sum(sum(each.targets) for each in row.documents)
    assert all(len(each.targets) == 1 for each in row.documents)


def test_documents_of_a_stream_and_windows(tmp_path: Path) -> None:
    """With flags, a document is shown; without, a window: all of both is trained."""
    texts = ["one ä", "two " * 300]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare([str(tmp_path / "in.jsonl")], tmp_path / "flags", Preparation(flags=True))
    second = read_row(tmp_path / "flags", 2)
    assert "".join(part.text for part in second.parts) == texts[1] + "\0"
    assert (second.kind, second.num_rows, second.documents[0].targets) == ("document", 2, [1201])
    prepare([str(tmp_path / "in.jsonl")], tmp_path / "plain")
    last = read_row(tmp_path / "plain", 3)
    assert (last.kind, last.num_rows, last.documents[0].num_tokens) == ("window", 3, 1208 - 2 * WINDOW_TOKENS)


def test_the_command_draws_writes_a_page_and_prints_json(
    chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a terminal, targets stand in brackets; the page and the JSON have the same text."""

    def run(*more: str) -> str:
        capsys.readouterr()
        assert headway(["data", "show", str(chats), *more]) == 0
        return capsys.readouterr().out

    shown = run()
    assert "row 1 of 2: " in shown
    assert "assistant\n⟦It is " in shown
    assert "⟧⟦" not in shown
    assert "tokens of padding" in run("--row", "2")
    page = tmp_path / "row.html"
    run("--html", str(page))
    assert "It is " in page.read_text()
    assert "⟦" not in page.read_text()
    table = json.loads(run("--json"))
    assert table["number"] == 1
    assert table["parts"][0]["text"] == "<|start|>"


def test_any_terminal_shows_what_is_trained(tmp_path: Path) -> None:
    """A locale without UTF-8, a name and a text with umlauts: prepared and shown, in marks that the terminal has.

    The padding is the token that ends a turn, and every answer is trained with it, also the last of the row.
    """
    folder = tmp_path / "ünï"
    folder.mkdir()
    write_chat_tokenizer(folder / "model")
    chat = [{"role": "user", "content": "Grüße"}, {"role": "assistant", "content": "größer"}]
    (folder / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n" + json.dumps({"messages": chat}) + "\n")
    program = [sys.executable, "-m", "headway.daemon.cli.main", "data"]
    where = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    options = ["--chat", "--tokenizer", "model", "--pack", "200", "--out", "dätä"]
    made, *shown = (
        subprocess.run([*program, *more], cwd=folder, env=where, check=True, capture_output=True).stdout.decode("ascii")
        for more in (["prepare", "chats.jsonl", *options], ["show", "dätä"], ["show", "dätä", "--json"])
    )
    assert made.count("{gr\\xf6\\xdfer<|end|>}") == shown[0].count("{gr\\xf6\\xdfer<|end|>}") == 2
    assert "tokens of padding" in shown[0]
    assert "größer" in "".join(part["text"] for part in json.loads(shown[1])["parts"])


def test_a_row_that_is_not_there_is_named(chats: Path, tmp_path: Path) -> None:
    """Each error says what there is, or how to make it."""
    with pytest.raises(ConfigError, match="there is no row 3: it has 2"):
        read_row(chats, 3)
    with pytest.raises(ConfigError, match=r"no token shards here.*make data with `headway data prepare`"):
        read_row(tmp_path, 1)
    with pytest.raises(ConfigError, match="has no validation split"):
        read_row(chats, 1, is_validation=True)
