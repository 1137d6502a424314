"""Renders conversations by a tokenizer's own chat template, in the sandbox that transformers uses for it.

The time of day is not in the sandbox: the same data gives the same tokens on any day.
"""

import json
import resource
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

from headway.daemon.data.documents import Conversation, library
from headway.daemon.errors import ConfigError

TEMPLATE_NAME: Final = "chat_template.jinja"
MAX_CHARACTERS: Final = 16 << 20
"""Maximum length of a rendered conversation."""
MAX_BITS: Final = 1024
"""Maximum width of a whole number that is a product."""
MAX_SECONDS: Final = 20.0
"""Maximum time to render one conversation once."""
AGAIN_S: Final = 0.2
"""Interval of the signals after it."""
MAX_BYTES: Final = 1 << 30
"""Maximum memory that one rendering adds: a template may double a text again and again within the time."""
MAX_SOURCE: Final = 1 << 20
"""Maximum size of a template: those of the Hub have a hundredth of it."""
_TOO_LARGE: Final = f"it takes more than {MAX_BYTES >> 30} GiB of memory"


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text."""

    text: str
    marked: tuple[tuple[int, int], ...]
    """Spans of characters between `{% generation %}` and its end."""


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, *, special: Mapping[str, str], name: str) -> None:
        """Raises ConfigError when the template is invalid. special: texts of special tokens, by name."""
        self.source = source
        self._special = dict(special)
        self._spans: list[tuple[int, int, str]] = []
        self._length = 0
        try:
            with _limited_time(), _limited_memory():  # jinja2 computes constant expressions at once
                self._template = _environment(self).from_string(source)
        except ConfigError:
            raise
        except MemoryError:
            raise ConfigError(f"its chat template is invalid: {_TOO_LARGE}", name) from None
        except Exception as error:  # templates are programs of others
            raise ConfigError(f"its chat template is invalid: {_line(error)}", name) from error

    def render(self, chat: Conversation, messages: Sequence[Any], *, is_prompt: bool = False) -> Rendered:
        """Render the first messages of a conversation. is_prompt: with the begin of an answer.

        Raises ConfigError, which names the place in the data: the template fails, or exceeds a limit.
        """
        self._spans, self._length = [], 0
        pieces: list[str] = []
        values = {
            **self._special,
            "messages": list(messages),
            "tools": chat.tools,
            "documents": None,
            "add_generation_prompt": is_prompt,
        }
        try:
            with _limited_time(), _limited_memory():
                for piece in self._template.generate(values):
                    pieces.append(piece)
                    self._length += len(piece)
                    if self._length > MAX_CHARACTERS:
                        raise ValueError(f"it is longer than {MAX_CHARACTERS >> 20} Mi characters")
        except MemoryError:  # its traceback would keep what the template has made
            pieces.clear()
            raise ConfigError(f"the chat template cannot render it: {_TOO_LARGE}", chat.where) from None
        except Exception as error:  # templates are programs of others
            raise ConfigError(f"the chat template cannot render it: {_line(error)}", chat.where) from error
        text = "".join(pieces)
        if any(text[start:end] != spoken for start, end, spoken in self._spans):
            raise ConfigError("the chat template changes what it marks with {% generation %}", chat.where)
        return Rendered(text, tuple((start, end) for start, end, _ in self._spans))

    def mark(self, spoken: str) -> str:
        """Note a text that the template is about to emit as an answer."""
        self._spans.append((self._length, self._length + len(spoken), spoken))
        return spoken


def read_template(folder: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    """Return the chat template of a tokenizer's folder; None: it has none. Raises ConfigError."""
    file, source = folder / TEMPLATE_NAME, config.get("chat_template")
    if file.is_file():
        try:
            source = _read(file)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot be read: {error}", str(file)) from error
    elif isinstance(source, list):
        named = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}
        source = named.get("default")
    if source is None:
        return None
    place = str(file if file.is_file() else folder / "tokenizer_config.json")
    if not isinstance(source, str):
        raise ConfigError("chat_template is no text", place)
    if len(source) > MAX_SOURCE:
        raise ConfigError(f"its chat template has more than {MAX_SOURCE} characters", place)
    texts = {key: _text(value) for key, value in config.items() if key.endswith("_token")}
    return ChatTemplate(source, special={key: text for key, text in texts.items() if text}, name=str(folder))


def _read(file: Path) -> str:
    """Return a template's text, of which no more is read than is allowed."""
    with file.open(encoding="utf-8") as stream:
        return stream.read(MAX_SOURCE + 1)


def _text(value: Any) -> str:
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""


def _environment(owner: ChatTemplate) -> Any:
    jinja2, sandbox = library("jinja2"), library("jinja2.sandbox")
    nodes, extensions = library("jinja2.nodes"), library("jinja2.ext")

    def parse(self: Any, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def mark(_self: Any, caller: Any) -> str:
        return owner.mark(caller())

    generation = type("Generation", (extensions.Extension,), {"tags": {"generation"}, "parse": parse, "_mark": mark})
    limits = {"intercepted_binops": frozenset({"*", "**"}), "call_binop": _limited_product}
    environment = type("Sandbox", (sandbox.ImmutableSandboxedEnvironment,), limits)(
        trim_blocks=True, lstrip_blocks=True, extensions=[generation, extensions.loopcontrols]
    )
    environment.filters["tojson"] = _to_json

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.globals["raise_exception"] = raise_exception
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _limited_product(_self: Any, _context: Any, operator: str, left: Any, right: Any) -> Any:
    """Multiply, or raise ValueError: neither the limit of time nor that of length ends a huge product."""
    if operator == "**":
        raise ValueError("it raises to a power")
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_BITS:
        raise ValueError(f"it makes a number of more than {MAX_BITS} bits")
    for many, times in ((left, right), (right, left)):
        if isinstance(many, Sized) and isinstance(times, int) and len(many) * times > MAX_CHARACTERS:
            raise ValueError(f"it is longer than {MAX_CHARACTERS >> 20} Mi characters")
    return left * right


def _renders(code: CodeType) -> bool:
    """Return whether code renders: jinja2's, a compiled template's, or that of its filters here.

    The limits themselves do not: a signal in their last lines would leave them in force.
    """
    file = code.co_filename
    if file == __file__:
        return code.co_name in ("mark", "raise_exception", _to_json.__name__, _limited_product.__name__)
    return "/jinja2/" in file or file in ("<template>", "<unknown>")


class _OutOfTimeError(BaseException):
    """The time is over. No Exception: jinja2 ignores those of a constant expression, and goes on."""


@contextmanager
def _limited_time() -> Iterator[None]:
    """Raise TimeoutError in the block when it takes too long; only a main thread can be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(_number: int, frame: FrameType | None) -> None:
        # Python ignores an error in a destructor, or in a callback of its collector: the next signal raises it.
        if frame is not None and _renders(frame.f_code):
            raise _OutOfTimeError

    handler = signal.signal(signal.SIGALRM, end)
    seconds, interval = signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS, AGAIN_S)
    try:
        yield
    except _OutOfTimeError as error:
        raise TimeoutError(f"it takes longer than {MAX_SECONDS:.0f} s") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, seconds, interval)


@contextmanager
def _limited_memory() -> Iterator[None]:
    """Raise MemoryError in the block when the process grows by more than a maximum. A lower limit of its own stays."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MAX_BYTES
    if soft != resource.RLIM_INFINITY and soft <= most:
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
