"""Published chat templates, as the wheel of TRL has them: our targets beside those of TRL's training templates.

TRL marks the answers by hand in a copy of each template. Ours come from the template as it is published. Where both
differ, a reason must hold, or the test fails. HEADWAY_WRITE=1 writes docs/chat_templates.md anew.
"""

import os
import re
from contextlib import suppress
from datetime import date
from functools import lru_cache
from itertools import groupby, product
from pathlib import Path
from textwrap import fill
from typing import Any, Final

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.text.chat_mask import Way, chat_texts
from headway.daemon.text.chat_template import ChatTemplate
from headway.daemon.text.documents import Conversation
from headway.daemon.text.special_words import SpecialWords

trl = pytest.importorskip("trl")

FOLDER: Final = Path(trl.__file__).parent / "chat_templates"
PAGE: Final = Path(__file__).parents[4] / "docs/chat_templates.md"
STOCK: Final = sorted(file.stem for file in FOLDER.glob("*.jinja") if not file.stem.endswith("_training"))
KINDS: Final = ("plain", "system", "tools", "thinking")
NAMES: Final = re.compile(r"<[|｜][^<>\s'\"]*>|<[^<>\s'\"|]*[|｜]>|<(?:start|end)_of_\w+>|</?s>|<(?:bos|eos)>")
TOOL: Final = {
    "name": "add",
    "description": "Adds.",
    "parameters": {
        "type": "object",
        "properties": {"of": {"type": "string", "description": "numbers"}},
        "required": ["of"],
    },
}
REASONS: Final = {
    "prompt": "TRL also trains the begin of an answer that the prompt for it has: no model ever says it.",
    "thought": "The template drops the thoughts of earlier answers. TRL trains these answers without them; here each"
    " answer is trained as the model gives it, in a text of its own. DeepSeek's template drops all thoughts.",
    "end": "The template ends earlier answers in another way than the last one. TRL trains that end, at which no model"
    " stops; here each answer is trained with its own.",
    "stop": "The template ends a turn that calls a tool by a token which TRL does not train.",
    "space": "A space that the template writes after the end of a turn counts here, as line ends do in both.",
    "refused": "The template leaves out that a tool is called. TRL trains an empty answer in its place.",
}


@lru_cache
def template(name: str) -> ChatTemplate:
    """A template with the special tokens that stand in it."""
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    names = SpecialWords(sorted({*NAMES.findall(source), "<bos>", "<eos>"}))
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    return ChatTemplate(source, special=special, names=names, words=names, today=date(2026, 1, 1), name=name)


def conversation(kind: str, turns: int) -> Conversation:
    """Turns of a question and an answer, of which each names its turn."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}] if kind == "system" else []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"Question {turn}?"})
        if kind == "tools":
            call = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"of": f"{turn}"}}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            messages.append({"role": "tool", "name": "add", "tool_call_id": "call00001", "content": f"sum {turn}"})
        thought = {"reasoning_content": f"Thought {turn}"} if kind == "thinking" else {}
        messages.append({"role": "assistant", "content": f"Answer {turn}.", **thought})
    tools = [{"type": "function", "function": TOOL}] if kind == "tools" else None
    return Conversation(messages=messages, tools=tools, where=kind)


def targets(name: str, chat: Conversation) -> tuple[Way, list[str]]:
    """What is trained, by turn. Raises ConfigError."""
    found = chat_texts(template(name), template(name).conversation(chat))
    answers: list[str] = []
    for text in found.texts:
        end = -1
        for start, stop in text.spans:  # marks that touch each other are one answer
            answers[-1:] = (
                [answers[-1] + text.text[start:stop]] if start == end else [*answers[-1:], text.text[start:stop]]
            )
            end = stop
    said = [answer for answer in answers if answer]
    return found.way, sorted(said, key=lambda answer: (re.findall(r"\d", answer)[-1:], "Answer" in answer))


def prompts(name: str, chat: Conversation) -> str:
    """The prompts for all answers of a conversation, one after the other."""
    formed = template(name).conversation(chat)
    found = []
    for at in range(len(formed.messages)):
        with suppress(ConfigError):  # some want a question
            found.append(template(name).render(formed, formed.messages[: at + 1], is_prompt=True).text)
    return "".join(found)


def reason(ours: str, theirs: str, prompt: str) -> str:
    """Why two texts of an answer differ; empty: they do not. Raises AssertionError if no reason holds."""
    if ours == theirs:
        return ""
    mine, other = (re.split(r"(?<=Answer \d\.)|(?<=tool_call\|>)", text, maxsplit=1) for text in (ours, theirs))
    (head, tail), (their_head, their_tail) = (each if len(each) == 2 else [each[0], ""] for each in (mine, other))
    if tail != their_tail:
        if tail == their_tail + " ":
            return "space"
        assert tail.startswith("<")
        return "end" if their_tail else "stop"
    if "Thought" in head and "Thought" not in their_head:
        return "thought"
    assert their_head.endswith(head), (ours, theirs)
    assert their_head.removesuffix(head).strip() in prompt, (ours, theirs, prompt)
    return "prompt"


def compared(name: str, kind: str, turns: int) -> str:
    """How our targets compare, in a word or two."""
    chat = conversation(kind, turns)
    training = f"{name}_training" if (FOLDER / f"{name}_training.jinja").is_file() else ""
    try:
        way, ours = targets(name, chat)
    except ConfigError as error:
        if "leaves out that message" in str(error):
            return "refused"
        with pytest.raises(ConfigError):
            targets(training or name, chat)
        return "no such chat"
    said = {Way.MARKED: "marked", Way.WHOLE: "", Way.PER_ANSWER: "per answer"}[way]
    if not training:
        return said or "one text"
    prompt = prompts(name, chat)
    _, theirs = targets(training, chat)
    assert len(ours) == len(theirs), (ours, theirs)
    why = sorted({reason(mine, other, prompt) for mine, other in zip(ours, theirs, strict=True)} - {""})
    return ", ".join(why) or "equal"


def page() -> str:
    """The page of all comparisons."""
    rows = []
    for name in STOCK:
        cells = []
        for kind in KINDS:
            found = [(compared(name, kind, turns), turns) for turns in (1, 2, 3)]
            groups = [(said, [turn for _, turn in each]) for said, each in groupby(found, key=lambda pair: pair[0])]
            cells.append("; ".join(said if len(groups) == 1 else f"{_turns(at)}: {said}" for said, at in groups))
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    legend = [fill(f"- **{word}**: {why}", 118, subsequent_indent="  ") for word, why in REASONS.items()]
    return "\n".join([HEAD, f"| template | {' | '.join(KINDS)} |", "|---|---|---|---|---|", *rows, "", *legend, TAIL])


def _turns(turns: list[int]) -> str:
    return f"{turns[0]} turn" if turns == [1] else f"{turns[0]} to {turns[-1]}" if len(turns) > 1 else str(turns[0])


HEAD: Final = """# Chat templates

What is trained with the chat templates that the wheel of TRL has, in conversations of one, two and three turns. A test
renders each and makes this page: `HEADWAY_WRITE=1 pytest tests/unit/daemon/text/test_stock_templates.py`. For most
templates TRL has a training template, in which the answers are marked by hand. **equal** means that our targets are
those of it, to the letter, with the published template. A word below says why they differ.
"""
TAIL: Final = """- **no such chat**: both templates refuse it, for instance a system message.
- **marked**, **one text**, **per answer**: TRL has no training template. [How the answers are
  found](data.md#conversations).
"""


def test_published_templates_train_what_trl_trains_or_a_reason_holds() -> None:
    """Each template, kind and number of turns is equal to TRL's or has one of the reasons; the page says which."""
    made = page()
    if os.environ.get("HEADWAY_WRITE"):
        PAGE.write_text(made, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == made


def test_published_templates_render_as_transformers_does() -> None:
    """Where one text has all answers, it is the text of transformers, to the letter, for each kind of conversation."""
    from transformers.utils.chat_template_utils import render_jinja_template

    num_equal = 0
    for name, kind in product(STOCK, KINDS):
        chat = conversation(kind, 2)
        source = template(name).source
        try:
            messages = template(name).conversation(chat).messages
            found = chat_texts(template(name), template(name).conversation(chat))
        except ConfigError:
            continue
        if found.way is Way.PER_ANSWER or "strftime_now" in source:
            continue
        rendered: Any = render_jinja_template(
            [messages], tools=chat.tools, chat_template=source, bos_token="<bos>", eos_token="<eos>"
        )
        theirs = rendered[0][0]
        last = found.texts[-1].text
        # GLM's template leaves the last turn open: ours ends it by the token that would follow.
        assert last == theirs or (last.startswith(theirs) and last.removeprefix(theirs) == "<|user|>"), name
        num_equal += 1
    assert num_equal > 100
