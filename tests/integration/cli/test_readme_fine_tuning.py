"""The README's second example, from a model's folder to an adapter: its lines run word for word, but for the download.

A tiny model of its family takes its place, that of the laptop and then that of the GPUs. 300 short conversations are
few batches of long rows, and three lines say so.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("jinja2")

import transformers

from tests.rigs.tiny_chats import VOCABULARY, write_chat_tokenizer, write_chats
from tests.rigs.tiny_models import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

README = Path(__file__).resolve().parents[3] / "README.md"
PRELUDE = f"""\
headway() {{ {sys.executable} -m headway.daemon.cli.main "$@"; }}
hf() {{ test "$1 $3 $4" = "download --local-dir base" && echo "model $2"; }}
"""


def example() -> str:
    """The example's block of the README."""
    section = README.read_text().partition("\n## Fine-tune a model\n")[2]
    return section.partition("```sh\n")[2].partition("```")[0]


@pytest.mark.parametrize(
    ("model", "family", "few"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", {"model_type": "llama", "tie_word_embeddings": True}, "2 batches"),
        ("Qwen/Qwen3-8B", {"model_type": "qwen3", "head_dim": 16}, "1 batch"),
    ],
)
def test_every_line_of_the_example_runs(program: Any, model: str, family: dict[str, Any], few: str) -> None:
    """On a cluster of two nodes: PEFT's folder has adapters, and transformers opens the merged model."""
    write_tiny_model(program.folder / "base", vocab_size=VOCABULARY, **family)
    write_chat_tokenizer(program.folder / "base")
    write_chats(program.folder / "chats.jsonl", count=300)
    lines = re.sub(rf"^model=.*({re.escape(model)} length=\d+).*", r"model=\1", example(), flags=re.MULTILINE)
    program.up("--nodes", "2")
    done = subprocess.run(
        ["bash", "-euc", PRELUDE + lines],
        cwd=program.folder,
        env={name: value for name, value in os.environ.items() if not name.startswith("HEADWAY_")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert f"model {model}\n" in done.stdout
    assert re.search(r"^held-out loss \d+\.\d{4} after the last update$", done.stdout, re.MULTILINE)
    assert done.stderr.count(f"{few} of 8 × 4 rows an epoch") == 3, "prepare, plan and submit"
    files = {path.name for path in (program.folder / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "chat_template.jinja"} <= files
    mark = json.loads((program.folder / "adapter" / "headway.json").read_text())
    assert mark["base_model"].endswith("/base")
    assert mark["last_batch"]["final_eval_loss"] > 0
    assert mark["last_batch"] == json.loads((program.folder / "adapter" / "metrics.jsonl").read_text().splitlines()[-1])
    opened = transformers.AutoModelForCausalLM.from_pretrained(program.folder / "merged")
    assert opened.config.model_type == family["model_type"]
