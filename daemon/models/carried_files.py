"""The files of a model's folder that its export carries over, those of PEFT, and what other folders are. Pure."""

import re
import shlex
from collections.abc import Collection
from typing import Final

_CONVERT: Final = (
    "python -c 'import sys; from transformers import AutoModelForCausalLM as M; "
    "M.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[1])'"
)
_KINDS: Final = (
    (r"manifest\.json", "belongs to a checkpoint of Headway: `headway submit --from {quoted}`"),
    (r"shards\.json", 'belongs to prepared data: [data] source = "{folder}"'),
    (r"snapshots", "belongs to the cache of the Hub; name the folder of a revision in it: {folder}/snapshots/REVISION"),
    (r"(adapter_)?config\.json", "belongs to a model: `headway submit JOB.toml --model {quoted}`"),
    (r".+\.gguf", "is GGUF, which is not read; take the model that it was made from: {download}"),
    (r"pytorch_model.*\.bin", f"is not read, because it is pickled; convert it: {_CONVERT} {{quoted}}"),
    (
        r"params\.json|consolidated.*\.(safetensors|pth)",
        "has another form than transformers'; take the files for transformers, mostly of the same name: {download}",
    ),
    (r".+\.(h5|msgpack|ot|onnx|pth|pt|bin)", "is no safetensors; take the model as safetensors: {download}"),
)
"""Names of files in the place of a model's, and what to do about each."""


def instead(names: Collection[str], folder: str) -> str:
    """Return the end of a sentence about a folder without config.json or weights. names: of its files, if known."""
    return (
        kind_of([name for name in names if not name.endswith("config.json")], folder)
        or f"{_download(folder)} gets a model of the Hub"
    )


def kind_of(names: Collection[str], folder: str) -> str:
    """Return what to do about a folder that is not of the kind that was asked for; empty: nobody knows it."""
    for pattern, what in _KINDS:
        if found := next((name for name in sorted(names) if re.fullmatch(pattern, name)), None):
            return f"{found} {what.format(download=_download(folder), folder=folder, quoted=shlex.quote(folder))}"
    return ""


def _download(folder: str) -> str:
    return f"`hf download OWNER/NAME --local-dir {shlex.quote(folder) if '://' not in folder else 'FOLDER'}`"


def no_such_folder(named: str, hint: str) -> str:
    """Return the sentence about a folder that is not there. hint: of a near name; without one, a name that does not
    look like a path may be one of the Hub.
    """
    if hint or named.startswith(("./", "../", "/", "~")):
        return f"there is no such folder{hint or '; name one that has config.json and safetensors'}"
    known = re.fullmatch(r"(?:https://huggingface\.co/)?([\w-]+/[\w.-]+?)(?:/tree/main)?/?", named, re.ASCII)
    if known is None:
        return "there is no such folder; a model of the Hub is written hf://OWNER/NAME"
    name = known[1]
    return (
        f'a model of the Hub is written from = "hf://{name}", or have it here: '
        f"`hf download {name} --local-dir {name.rpartition('/')[2]}`"
    )


CONFIG_NAME: Final = "config.json"
ADAPTER_CONFIG_NAME: Final = "adapter_config.json"
ADAPTER_WEIGHTS_NAME: Final = "adapter_model.safetensors"
PEFT_PREFIX: Final = "base_model.model."
"""Before the names of a checkpoint, in a folder of adapters."""
CARRIED: Final = (
    CONFIG_NAME,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors.index.json",
)
MAX_CONFIG_BYTES: Final = 1 << 20
MAX_CARRIED_BYTES: Final = 64 << 20
"""Maximum size of one carried file: the largest tokenizers have half of it."""
FILE: Final = "file/"
"""Prefix of a carried file among the tensors of the carried part."""
HEADER: Final = "header/"
"""Prefix of the header of a file with tensors, so that an export can write equal bytes."""
