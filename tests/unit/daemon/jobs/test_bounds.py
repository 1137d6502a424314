"""Every size has a largest value with its reason, and whatever a file holds, its reader has one line or a job."""

from collections.abc import Iterator
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.daemon.base.errors import ConfigError
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.jobs.job_file import parse_job, read_job_file
from headway.daemon.jobs.rules import bounds_of, check_job
from headway.daemon.jobs.typed_toml import MAX_BYTES

BOUNDS = bounds_of(JobSpec)
NAMED = '[job]\nname = "x"\n'

REFUSED = {
    "poison": (
        NAMED + "[model]\nnum_hidden_layers = 1000000",
        "num_hidden_layers: must be at most 1024, is 1000000: the",
    ),
    "wide": (NAMED + "[model]\nhidden_size = 640000", "hidden_size: must be at most 65536, is 640000: no layer's"),
    "all at once": (
        NAMED + "[model]\nnum_hidden_layers = 1024\nhidden_size = 65536\nintermediate_size = 262144",
        "model: asks for 6.6e+13 parameters; at most 1e+13",
    ),
    "one microbatch of everything": (
        NAMED + "[train]\nmicrobatch_size = 65536\nsequence_length = 1048576",
        "train.microbatch_size: 65536 sequences of 1048576 tokens",
    ),
    "many bits": (NAMED + f"[model]\nhidden_size = {'9' * 400}", "must be at most 65536, is a number of 1329 bits"),
    "many digits": (NAMED + f"[model]\nhidden_size = {'9' * 5000}", "not valid TOML"),
    "many negative bits": (NAMED + f"[model]\nhidden_size = -{'9' * 400}", "must be at least 1, is a number of"),
    "a float of many bits": (NAMED + f"[train]\nclip_norm = 0x{'f' * 9000}", "train.clip_norm: "),
    "name of many bits": (f"[job]\nname = 0x{'f' * 9000}", "job.name: expected str, got int (a number of 36000 bits)"),
    "rate that overflows": (
        NAMED + '[optim]\nrest = { name = "sgd", lr = 1e308 }',
        "lr: must be at most 1000, is 1e+308",
    ),
    "rate below zero": (
        NAMED + '[optim]\nrest = { name = "sgd", lr = -0.0 }',
        "optim.rest.lr: must be above 0, is -0.0",
    ),
    "infinite": (NAMED + "[train]\nclip_norm = inf", "train.clip_norm: expected a finite number, got inf"),
    "deep": (NAMED + f"[data]\nsource = {'[' * 5000}{']' * 5000}", "nested too deeply"),
    "deep key": (NAMED + ".".join("a" * 100_000) + " = 1", "line 3 has more than 256 dots"),
    "deep section": (NAMED + "[" + ".".join("a" * 100_000) + "]", "line 3 has more than 256 dots"),
    "huge": (NAMED + "#" * MAX_BYTES, "is larger than 1 MiB"),
    "date that is none": (NAMED + "[data]\nsource = 2024-02-31", "not valid TOML"),
    "control character": (NAMED + '[data]\nsource = "a\\u001b[2J"', "data.source: 'a\\x1b[2J' has a character that"),
    "zero character": (NAMED + '[data]\nsource = "a\\u0000"', "data.source: 'a\\x00' has a character that"),
    "long name": (f'[job]\nname = "{"a" * 10_000}"', "…"),
    "long path": (NAMED + f'[data]\nsource = "{"a" * 2000}"', "data.source: has 2000 characters; at most 1024"),
    "site of two lines": (NAMED + '[placement]\nsites = ["a\\nb"]', "placement.sites[0]: 'a\\nb' has a character"),
    "many sites": (NAMED + "[placement]\nsites = [" + '"a",' * 1001 + "]", "placement.sites: names 1001 sites"),
    "no hash": (NAMED + '[data]\nsha256 = "../x"', "data.sha256: '../x' is not a SHA-256"),
    "optimizer that is a list": (
        NAMED + "[optim]\nrest = { name = [1] }",
        "optim.rest.name: expected str, got array ([1])",
    ),
}

PLACES = {
    "memory://bucket/x": "memory:// is not a store that every node can write to",
    "local://checkpoints": "is relative, which a URL cannot be; write local:///absolute/path",
    "file://checkpoints": "is relative, which a URL cannot be",
    "../elsewhere": "leads out of its folder with `..`",
    "/a/../../etc": "leads out of its folder with `..`",
    "s3://bucket/../other": "leads out of its folder with `..`",
    "zip://x.zip": "zip:// is not a store",
    "ftp://host/x": "ftp:// is not a store",
    "reference://x": "reference:// is not a store",
    "simplecache::s3://bucket/x": "chains file systems",
    "s3://": "names no bucket",
    "   ": "is empty",
}


@pytest.mark.parametrize(("text", "line"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_with_one_line(text: str, line: str) -> None:
    """A size without sense, a number nobody can print, a text that would draw on a terminal: one line each."""
    with pytest.raises(ConfigError) as refused:
        parse_job(text, "job.toml")
    assert line in str(refused.value)
    assert str(refused.value).startswith("job.toml")
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("key", BOUNDS)
def test_every_bound_says_why(key: str) -> None:
    """One more than the largest value is refused at its key, with the reason."""
    _, most, why = BOUNDS[key]
    with pytest.raises(ConfigError) as refused:
        check_job(_with(key, most * 2 + 1), "job.toml")
    assert refused.value.where == f"job.toml:{key.replace('model.adapter.', 'adapter.')}"
    assert refused.value.what.endswith(why)


def test_every_number_has_bounds() -> None:
    """No number of a job is without them, but those that a rule of their own looks at."""
    numbers = {key for key, kind in numbers_of(JobSpec) if kind in (int, float)}
    assert {key.rsplit(".", 1)[-1] for key in numbers - BOUNDS.keys()} == {"momentum"}


def numbers_of(kind: Any, section: str = "") -> Iterator[tuple[str, Any]]:
    """Key and type of each field of a job."""
    for name, told in get_type_hints(kind).items():
        if is_dataclass(told):
            yield from numbers_of(told, f"{section}{name}.")
        yield f"{section}{name}", told


@pytest.mark.parametrize(("place", "line"), PLACES.items())
def test_checkpoints_lie_where_every_node_sees_them(place: str, line: str) -> None:
    """A folder in one process, in an archive, or outside the one that was named is refused by one rule."""
    with pytest.raises(ConfigError) as refused:
        parse_job(NAMED + f'[fault]\ncheckpoint_dir = "{place}"', "job.toml")
    assert refused.value.where == "job.toml:fault.checkpoint_dir"
    assert line in refused.value.what


@pytest.mark.parametrize("place", ["checkpoints", "/mnt/a", "s3://bucket/x", "file:///mnt/a", "gs://b", "a/b.c"])
def test_shared_folders_and_stores_are_accepted(place: str) -> None:
    assert parse_job(NAMED + f'[fault]\ncheckpoint_dir = "{place}"').fault.checkpoint_dir == place


def test_a_file_without_end_is_not_read() -> None:
    """A device that never ends costs one mebibyte."""
    with pytest.raises(ConfigError, match="is larger than 1 MiB"):
        read_job_file(Path("/dev/zero"))


_KEYS = st.sampled_from([key.split(".")[-1] for key in BOUNDS] + ["name", "source", "betas", "sites", "zzz", "rest"])
_NUMBERS = st.integers() | st.floats() | st.booleans() | st.sampled_from([2**31, 10**40, 1e308, -0.0, 5e-324])
_VALUES = st.recursive(
    _NUMBERS | st.text(st.characters(codec="utf-8"), max_size=20) | st.dates() | st.times(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=6,
)
_SECTIONS = st.sampled_from(["job", "model", "data", "train", "optim", "fault", "placement", "zzz"])


@given(st.dictionaries(_SECTIONS, st.dictionaries(_KEYS, _VALUES, max_size=4) | _VALUES, max_size=5))
def test_any_toml_is_a_job_or_one_line(raw: dict[str, Any]) -> None:
    """Whatever sections, keys and values a file has: a job that keeps every rule, or a ConfigError of one line."""
    raw.setdefault("job", {"name": "x"})
    text = "".join(f"{_quoted(key)} = {_toml(value)}\n" for key, value in raw.items())
    said = _refusal(text)
    assert "\n" not in said
    assert len(said) < 2000


@given(st.text(max_size=60))
def test_any_text_is_a_job_or_one_line(text: str) -> None:
    """Whatever a file holds."""
    with pytest.raises(ConfigError):
        parse_job(text, "job.toml")


def _refusal(text: str) -> str:
    """The line that a file gets; empty: it is a job, which keeps every rule."""
    try:
        check_job(parse_job(text, "job.toml"), "job.toml")
    except ConfigError as error:
        return str(error)
    return ""


def _with(key: str, value: float) -> JobSpec:
    spec = JobSpec(job=JobSection(name="x"))
    sections = key.split(".")
    changed: JobSpec = _replaced(spec, sections, value)
    return changed


def _replaced(part: Any, names: list[str], value: float) -> Any:
    head, *rest = names
    return replace(part, **{head: _replaced(getattr(part, head), rest, value) if rest else value})


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_quoted(key)} = {_toml(inner)}' for key, inner in value.items())}}}"
    return str(value)


def _quoted(text: str) -> str:
    return '"' + "".join(char if char.isalnum() else f"\\U{ord(char):08x}" for char in text) + '"'


@pytest.mark.parametrize("factor", ["1e-320", "1e-300", "1e-6", "1e6"])
def test_a_factor_of_any_size_is_read(factor: str) -> None:
    """Its inverse square, which one family's config.json would have, has no float."""
    spec = parse_job(f"{NAMED}[model]\nattention_multiplier = {factor}\n")
    assert spec.model.attention_multiplier == float(factor)
