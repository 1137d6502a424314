"""What people touch: the options of every command, the keys of `--json`, the sentence about each bad job."""

import dataclasses
import io
import json
from collections.abc import Iterator
from contextlib import redirect_stdout
from typing import Any, Literal, get_args, get_origin, get_type_hints

from headway.daemon.base.errors import ConfigError
from headway.daemon.cli.program import program
from headway.daemon.client.preview import PlanPreview
from headway.daemon.cluster.records import NodeRecord
from headway.daemon.jobs.job import JobSpec
from headway.daemon.jobs.job_file import parse_job
from headway.daemon.reports.job_report import JobReport
from headway.stages.spec import AdapterSpec


def record() -> dict[str, str]:
    """Command, report or job, to its options, keys or sentence."""
    commands = {f"command {name}": text for name, text in _commands(program(), ("headway",))}
    reports = {f"keys of {kind.__name__}": json.dumps(_keys(kind)) for kind in (JobReport, NodeRecord, PlanPreview)}
    return commands | reports | {f"job {text}": _sentence(text) for text in bad_jobs()}


def _commands(command: Any, names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    facts = [(*sorted(each.opts), str(each.default), each.required, each.nargs) for each in command.params]
    shown = io.StringIO()
    with redirect_stdout(shown):
        command.main(["--help"], prog_name=" ".join(names), standalone_mode=False)
    yield " ".join(names), json.dumps(sorted(map(str, facts)))
    yield f"{' '.join(names)} --help", shown.getvalue()
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        yield from _commands(inner, (*names, name))


def _keys(kind: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return {item.name: _keys(hints[item.name]) for item in dataclasses.fields(kind)}
    inner = [found for each in get_args(kind) if (found := _keys(each))]
    return inner[-1] if inner else ""


def bad_jobs() -> Iterator[str]:
    """Job files, each with one key that is wrong, or has no effect, or is as it should be."""
    sections = {name: kind for name, kind in get_type_hints(JobSpec).items() if name not in ("job", "origin")}
    for section, kind in (sections | {"adapter": AdapterSpec}).items():
        for key, values in _values(kind, section):
            for value in values:
                named = 'optim.matrices.name = "adamw"\noptim.rest.name = "sgd"\n' if key.count(".") > 1 else ""
                yield f'job.name = "a"\n{named}{key} = {value}'
    for name in ('""', '"A b"', '"-"', '"é"', "3", f'"{"a" * 80}"'):
        yield f"job.name = {name}"
    yield from ("", "job = 3", "[job", "job.name = 'a'\njob.seed = -1", "job.name = 'a'\nmodel.from = ''")


def _values(kind: Any, place: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    hints = get_type_hints(kind)
    for item in dataclasses.fields(kind):
        told, key = hints[item.name], f"{place}.{item.name}"
        if dataclasses.is_dataclass(told):
            if item.name != "adapter":
                yield from _values(told, key)
        elif get_origin(told) is Literal:
            yield key, (*(json.dumps(choice) for choice in get_args(told)), '"nothing"', "3")
        elif told is bool:
            yield key, ("true", "false", "1")
        elif told in (int, float):
            yield key, ("-11", "-0.5", "0", "1", "3", "7.5", "70000", "1_000_000_000_000", "nan", "inf", '"3"')
        else:
            yield key, ('"x"', '""', "[]", "[1]", '["a", "a"]', "[0.5, 2.0]", "3", f'"{"y" * 2000}"', r'"\u0007"')


def _sentence(text: str) -> str:
    try:
        parse_job(text, "job.toml")
    except ConfigError as error:
        return str(error)
    return "taken"
