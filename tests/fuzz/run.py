"""`make fuzz`: minutes of bytes that nobody would send, at every boundary of tests/fuzz/targets.py.

    python -m tests.fuzz.run --minutes 10
    python -m tests.fuzz.run --target "layer file" --minutes 1

Each target runs in a process of its own, with a limit on its memory and on the processor time of one input: atheris
guides it by coverage where it is installed (`pip install atheris`), otherwise mutations of valid bytes are drawn. An
input that is a find is written to --keep; --replay FILE runs one input again.
"""

import argparse
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.fuzz.one_input import OneInput, kept_input
from tests.fuzz.standstill import wait_for

MAX_BYTES: Final = 4096
MEMORY_BYTES: Final = 3 << 30
MARGIN_S: Final = 60
"""Seconds of processor time for the imports."""
NEVER_S: Final = 10**6
TOKENS: Final = (
    b"1e308", b"-1", b"NaN", b"\xff\xfe", b"\0", b"[" * 2000, b'{"a":' * 500, b"9" * 400, b"..", b"/", b"\x1b[2J",
    b"null", b'""', b"18446744073709551616", b"true",
)  # fmt: skip
"""Texts that break parsers more often than chance does."""


def mutated(seed: bytes, draw: random.Random) -> bytes:
    """Valid bytes after one to eight changes."""
    data = bytearray(seed)
    for _ in range(draw.randint(1, 8)):
        place = draw.randint(0, len(data))
        match draw.randint(0, 4):
            case 0 if data:
                data[min(place, len(data) - 1)] ^= 1 << draw.randint(0, 7)
            case 1:
                data[place:place] = draw.choice(TOKENS)
            case 2:
                del data[place : place + draw.randint(1, 40)]
            case 3:
                data[place : place + draw.randint(0, 20)] = draw.choice(TOKENS)
            case _:
                start = draw.randint(0, len(data))
                data[place:place] = data[start : start + draw.randint(1, 60)]
    return bytes(data)


def fuzz(name: str, *, seconds: float, seed: int, keep: Path) -> int:
    """Run one target in this process until the time is up; returns the number of inputs. Raises what it found."""
    from tests.fuzz.targets import TARGETS

    target, draw = TARGETS[name], random.Random(seed)
    seeds = target.seeds()
    run = OneInput(target.run, _kept(keep, name))
    for valid in seeds:
        run(valid)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    deadline, number = time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        run(mutated(draw.choice(seeds), draw))
        number += 1
    return number


def guided(name: str, *, seconds: float, seed: int, keep: Path) -> None:
    """Fuzz with atheris, which ends the process."""
    import atheris

    with atheris.instrument_imports(include=["headway", "tests.fuzz.targets"]):
        from tests.fuzz.targets import TARGETS
    corpus = keep / f"{name.replace(' ', '-')}.corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, valid in enumerate(TARGETS[name].seeds()):
        (corpus / f"seed-{number}").write_bytes(valid)
    dictionary = keep / "tokens.dict"
    words = ["".join(rf"\x{byte:02x}" for byte in token[:60]) for token in TOKENS]
    dictionary.write_text("".join(f'"{word}"\n' for word in words))
    options = [
        f"-max_total_time={int(seconds)}",
        f"-seed={seed}",
        f"-timeout={NEVER_S}",  # by the wall's clock; ours goes by the processor's
        f"-rss_limit_mb={MEMORY_BYTES >> 20}",
        f"-max_len={MAX_BYTES}",
        f"-dict={dictionary}",
        f"-artifact_prefix={keep}/{name.replace(' ', '-')}-",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], str(corpus), *options], OneInput(TARGETS[name].run, _kept(keep, name)))
    atheris.Fuzz()


def main(arguments: list[str]) -> int:
    """Run the targets one after the other. Returns 0, or 1 when one of them found something."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all targets together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", default="", help="only this one")
    parser.add_argument("--keep", type=Path, default=None, help="folder for inputs that are finds")
    parser.add_argument("--replay", type=Path, default=None, help="run one input of --target again")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    keep = (options.keep or Path(tempfile.mkdtemp(prefix="fuzz-"))).absolute()
    keep.mkdir(parents=True, exist_ok=True)
    if options.inside:
        return _inside(options.target, 60.0 * options.minutes, options.seed, keep)
    from tests.fuzz.targets import TARGETS

    if options.replay is not None:
        TARGETS[options.target].run(options.replay.read_bytes())
        return 0
    names = [options.target] if options.target else list(TARGETS)
    minutes = options.minutes / len(names)
    failed = [name for name in names if not _one(name, minutes, options.seed, keep)]
    sys.stdout.write(f"{len(names) - len(failed)} targets passed, {len(failed)} failed; inputs in {keep}\n")
    return 1 if failed else 0


def _inside(name: str, seconds: float, seed: int, keep: Path) -> int:
    try:
        import atheris  # noqa: F401
    except ImportError:
        sys.stdout.write(f"{fuzz(name, seconds=seconds, seed=seed, keep=keep)} inputs by mutation\n")
        return 0
    guided(name, seconds=seconds, seed=seed, keep=keep)
    return 0


def _one(name: str, minutes: float, seed: int, keep: Path) -> bool:
    command = [sys.executable, "-m", "tests.fuzz.run", "--inside", "--target", name]
    command += ["--minutes", str(minutes), "--seed", str(seed), "--keep", str(keep)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, text=True, env=environment)
        hangs = wait_for(process, most_s=60.0 * minutes + MARGIN_S)
        output.seek(0)
        said = output.read().strip().splitlines()
    kept = _kept(keep, name)
    if process.returncode and kept.exists():
        kept.with_suffix(".input").write_bytes(kept_input(kept))
    kept.unlink(missing_ok=True)
    facts = [line for line in said if "inputs by mutation" in line or "number_of_executed_units" in line]
    facts += [line for line in said if "peak_rss_mb" in line or "slowest_unit_time_sec" in line]
    verdict = f"HANGS: {hangs}" if hangs else "FAILED" if process.returncode else "passed"
    sys.stdout.write(f"{name}: {verdict} {'; '.join(facts)}\n")
    if process.returncode:
        sys.stdout.write("\n".join(f"    {line[:300]}" for line in said[-25:]) + "\n")
    sys.stdout.flush()
    return not process.returncode


def _kept(keep: Path, name: str) -> Path:
    """Return the file in which a target's process keeps its present input."""
    return keep / f"{name.replace(' ', '-')}.running"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
