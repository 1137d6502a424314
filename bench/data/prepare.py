"""Preparing data: megabytes of text a second and peak memory, against `datasets` with `tokenizers` on the same text.

Generated English-like words as JSON lines, and a byte-level BPE tokenizer of 8,000 tokens that is trained on them. Each
side is a process of its own: headway packs rows of 2,048 tokens and their flags, `datasets` maps and saves to disk.
`datasets` is left out where it is not installed.

    python bench/data/prepare.py --megabytes 2000
"""

import argparse
import importlib.util
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PACK = 2048
SIDES = ("headway", "datasets")


def generate(folder: Path, megabytes: int) -> None:
    """Write text.jsonl and tokenizer.json."""
    import tokenizers

    draw = random.Random(0)
    letters = "etaoinshrdlucmfw"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(20_000)]
    written = 0
    sample: list[str] = []
    with (folder / "text.jsonl").open("w", encoding="utf-8") as file:
        while written < megabytes * 10**6:
            text = " ".join(draw.choices(words, k=draw.randint(50, 600)))
            written += file.write(json.dumps({"text": text}) + "\n")
            if len(sample) < 1000:
                sample.append(text)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=8000, special_tokens=["<|endoftext|>"], show_progress=False)
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def with_headway(folder: Path) -> None:
    """Prepare packed rows."""
    from headway.daemon.text.preparation import Preparation
    from headway.daemon.text.prepare import prepare

    options = Preparation(tokenizer=str(folder / "tokenizer.json"), pack=PACK)
    prepare([str(folder / "text.jsonl")], folder / "headway", options)


def with_datasets(folder: Path) -> None:
    """Map a tokenizer over the same records, and save."""
    import datasets
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    cache = str(folder / "cache")
    texts = datasets.load_dataset("json", data_files=str(folder / "text.jsonl"), split="train", cache_dir=cache)

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": [found.ids for found in tokenizer.encode_batch(batch["text"])]}

    texts.map(encode, batched=True, remove_columns=["text"]).save_to_disk(str(folder / "datasets"))


def measured(side: str, folder: Path) -> dict[str, float]:
    """Run one side in a process of its own."""
    command = [sys.executable, __file__, "--side", side, "--folder", str(folder)]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, float] = json.loads(told.splitlines()[-1])
    return found


def run_side(side: str, folder: Path) -> None:
    """Print one side's figures."""
    began = time.monotonic()
    with_headway(folder) if side == "headway" else with_datasets(folder)
    seconds = time.monotonic() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    megabytes = (folder / "text.jsonl").stat().st_size / 1e6
    sys.stdout.write(json.dumps({"mb_per_s": megabytes / seconds, "seconds": seconds, "peak_bytes": peak}) + "\n")


def main() -> None:
    """Measure both sides, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=2000)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        run_side(options.side, options.folder)
        return
    sides = [side for side in SIDES if side == "headway" or importlib.util.find_spec(side)]
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder), options.megabytes)
        found = {side: measured(side, Path(folder)) for side in sides}
    sys.stdout.write(json.dumps({"megabytes": options.megabytes, "cores": os.cpu_count(), **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
