"""Whatever is wrong in a model's folder becomes one line that names file and key."""

import json
import math
import re
import shutil
import sys
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from headway.daemon.base.errors import ConfigError, NoAccessError, RecoveryError, StorageAwayError
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.jobs.job_file import parse_job
from headway.daemon.jobs.rules import check_job
from headway.daemon.models import tensor_places
from headway.daemon.models.carried_files import instead
from headway.daemon.models.origin_config import model_opener
from headway.daemon.models.origin_folder import OriginFolder
from headway.daemon.models.origin_model import with_parts
from headway.daemon.models.origin_parts import read_part
from headway.daemon.models.tensor_places import HeaderError, find_tensors, tensors_of
from headway.stages.model.decoder import parameter_shapes
from headway.stages.model.families import MOST_EXPERTS
from headway.stages.model.hugging_face import checkpoint_name, hugging_face_config, layer_parameter
from headway.stages.spec import ModelSpec, layer_names
from tests.rigs.file_server import serving

MODEL = ModelSpec(
    num_hidden_layers=2,
    hidden_size=8,
    intermediate_size=8,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=256,
)
NAMES = [checkpoint_name(layer, name, MODEL) for layer in layer_names(MODEL) for name in parameter_shapes(layer, MODEL)]


def write_folder(folder: Path, **shards: list[str]) -> Path:
    """A whole model of two shards, or of other shards."""
    folder.mkdir(exist_ok=True)
    shards = shards or {"one": NAMES[:9], "two": NAMES[9:]}
    config = hugging_face_config(MODEL, dtype="float32", sequence_length=16)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        checkpoint_name(layer, n, MODEL): s
        for layer in layer_names(MODEL)
        for n, s in parameter_shapes(layer, MODEL).items()
    }
    for shard, names in shards.items():
        save_file({name: torch.rand(shapes[name]) for name in names}, folder / f"{shard}.safetensors")
    weight_map = {name: f"{shard}.safetensors" for shard, names in shards.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def submitted(folder: Path) -> JobSpec:
    """What a submission does with a folder."""
    opened, model = model_opener(folder.parent)(folder.name, ())
    return with_parts(JobSpec(job=JobSection(name="j"), model=model, origin=replace(opened, job="j")))


def edit(name: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Alter a JSON file."""

    def apply(folder: Path) -> None:
        raw = json.loads((folder / name).read_text())
        change(raw)
        (folder / name).write_text(json.dumps(raw))

    return apply


def header(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Alter the header of one.safetensors, and leave its data."""

    def apply(folder: Path) -> None:
        raw = (folder / "one.safetensors").read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        table = json.loads(raw[8:end])
        change(table)
        head = json.dumps(table).encode()
        (folder / "one.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + raw[end:])

    return apply


def cut(name: str, num_bytes: int) -> Callable[[Path], None]:
    """Cut a file's end off."""

    def apply(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:-num_bytes])

    return apply


def written(name: str, raw: bytes) -> Callable[[Path], None]:
    """Replace a file."""

    def apply(folder: Path) -> None:
        (folder / name).write_bytes(raw)

    return apply


INDEX = "model.safetensors.index.json"
FIRST = "model.embed_tokens.weight"
WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), r"config.json: is missing; `hf download OWNER/NAME"),
    "config is no JSON": (written("config.json", b"{"), r"config.json: is not JSON"),
    "config is a list": (written("config.json", b"[]"), r"config.json: is not a JSON object"),
    "config is deep": (written("config.json", b"[" * 100_000), r"config.json: is not JSON \(RecursionError\)"),
    "config is huge": (written("config.json", b" " * (1 << 20) + b"{}"), r"config.json: has 1048578 bytes; at most"),
    "config asks for more": (
        edit("config.json", lambda c: c.update(attn_logit_softcapping=50.0)),
        r"config.json: attn_logit_softcapping = 50.0 is not supported",
    ),
    "config has a word": (edit("config.json", lambda c: c.update(hidden_size="8")), r"hidden_size = '8' is no whole"),
    "config has a key twice": (
        written("config.json", b'{"model_type": "llama", "hidden_size": 8, "hidden_size": 16}'),
        r"config.json: names hidden_size twice",
    ),
    "config has NaN": (
        edit("config.json", lambda c: c.update(rms_norm_eps=math.nan)),
        r"config.json: rms_norm_eps = nan is no finite number",
    ),
    "config has a key of control characters": (
        edit("config.json", lambda c: c.update({"a\n\x1b[2J": 1})),
        r"config.json: a\\n\\x1b\[2J = 1 is not known here",
    ),
    "config has a long key": (edit("config.json", lambda c: c.update({"k" * 9000: 1})), r"config.json: k{500}…$"),
    "config has a long number": (
        edit("config.json", lambda c: c["rope_parameters"].update(rope_theta=10**4000)),
        r"config.json: rope_theta = 10{483,}…$",
    ),
    "config has a word for a length": (
        edit(
            "config.json",
            lambda c: c.update(
                max_position_embeddings="x",
                rope_parameters={"rope_type": "yarn", "original_max_position_embeddings": 4},
            ),
        ),
        r"config.json: max_position_embeddings = 'x' is no number above 0",
    ),
    "config has a word for a truth": (
        edit(
            "config.json",
            lambda c: c.update(
                rope_parameters={
                    "rope_type": "yarn",
                    "factor": 2.0,
                    "original_max_position_embeddings": 4,
                    "truncate": "x",
                }
            ),
        ),
        r"config.json: truncate = 'x' is neither true nor false",
    ),
    "config has two numbers of experts": (
        edit("config.json", lambda c: c.update(model_type="mixtral", num_experts=4, num_local_experts=8)),
        r"config.json: num_local_experts = 8 is not num_experts = 4",
    ),
    "no weights": (
        lambda f: (f / INDEX).unlink(),
        r"has neither model.safetensors nor \S+; `hf download",
    ),
    "index leads out": (
        edit(INDEX, lambda c: c["weight_map"].update({FIRST: "../one.safetensors"})),
        r"index.json: weight_map\[model.embed_tokens.weight\] = ../one.safetensors is no file of this folder",
    ),
    "index names a path": (
        edit(INDEX, lambda c: c["weight_map"].update({FIRST: "/etc/passwd"})),
        r"= /etc/passwd is no file of this folder",
    ),
    "index names a tensor twice": (
        written(INDEX, b'{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}'),
        r"index.json: names a twice",
    ),
    "index has no map": (written(INDEX, b"{}"), r"index.json: weight_map is missing"),
    "shard is missing": (lambda f: (f / "two.safetensors").unlink(), r"two.safetensors: is missing"),
    "tensor is elsewhere": (
        edit(INDEX, lambda c: c["weight_map"].update({FIRST: "two.safetensors"})),
        r"safetensors: (has model.embed_tokens.weight, which .* does not say|lacks model.embed_tokens.weight)",
    ),
    "shard is cut off": (cut("one.safetensors", 4), r"one.safetensors: is truncated: its tensors end at byte"),
    "shard is empty": (written("one.safetensors", b""), r"one.safetensors: is truncated: 0 bytes"),
    "header is cut off": (
        written("one.safetensors", (10**6).to_bytes(8, "little") + b"{}"),
        r"is truncated: its header",
    ),
    "header is absurd": (written("one.safetensors", b"\xff" * 64), r"says that its header has 18446744073709551615"),
    "header is no JSON": (written("one.safetensors", (2).to_bytes(8, "little") + b"[}"), r"header that is not JSON"),
    "header twice": (
        written("one.safetensors", (13).to_bytes(8, "little") + b'{"a":1,"a":2}'),
        r"one.safetensors: names a twice",
    ),
    "dtype is unknown": (header(lambda t: t[FIRST].update(dtype="F4")), r"in the unknown dtype F4"),
    "dtype is not read": (
        header(lambda t: t[FIRST].update(dtype="I32")),
        r"model.embed_tokens.weight in I32; read are",
    ),
    "shape is absurd": (header(lambda t: t[FIRST].update(shape=[1 << 40, 1 << 40])), r"of an impossible shape"),
    "shape is negative": (header(lambda t: t[FIRST].update(shape=[-1, 8])), r"of an impossible shape"),
    "size and shape disagree": (header(lambda t: t[FIRST].update(shape=[255, 8])), r"gives model.embed_tokens.weight"),
    "shape is another": (
        header(lambda t: t[FIRST].update(shape=[8, 256])),
        r"of shape \[8, 256\], and config.json asks",
    ),
    "offsets overlap": (
        header(lambda t: t["model.layers.0.self_attn.q_proj.weight"].update(data_offsets=[0, 256])),
        r"one.safetensors: has .* and .* in the same bytes",
    ),
    "a name is missing": (header(lambda t: t.update({"x": t.pop(FIRST)})), r"lacks model.embed_tokens.weight, which"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_folder_is_refused(name: str, tmp_path: Path) -> None:
    """Each fault stops the submission with one line."""
    folder = write_folder(tmp_path / "model")
    spoil, expected = WRONG[name]
    spoil(folder)
    with pytest.raises(ConfigError, match=expected) as refused:
        submitted(folder)
    assert str(tmp_path) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("number", [10**9, 10**4000])
@pytest.mark.parametrize("types", [None, ["full_attention"]])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2"])
def test_a_config_of_too_many_blocks_costs_no_memory(
    tmp_path: Path, model_type: str, types: list[str] | None, number: int
) -> None:
    """The bound of a job refuses the number, and nothing of that length exists before."""
    folder = write_folder(tmp_path / "model")
    edit(
        "config.json",
        lambda c: c.update(model_type=model_type, num_hidden_layers=number, attention_bias=False, layer_types=types),
    )(folder)
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=r"config\.json:num_hidden_layers: must be at most 1024"):
            parse_job('[job]\nname = "j"\n[model]\nfrom = "model"\n', open_model=model_opener(tmp_path))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_a_server_that_sends_without_end_is_left(tmp_path: Path) -> None:
    """A range is answered by more bytes than it has, and no end: the reading stops at the first piece too many."""
    write_folder(tmp_path / "model")
    with serving(tmp_path) as server:
        server.is_endless = True
        with pytest.raises(ConfigError, match=r"config.json: comes as a whole: its server does not answer by range"):
            model_opener(tmp_path)(f"{server.url}/model", ())
    assert [file for file, _ in server.asked] == ["adapter_config.json", "config.json"]


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_fails_lacks_no_file(tmp_path: Path, status: int) -> None:
    """Each question ends with an outage that has the server's answer; a file counts as missing by a 404 alone."""
    with serving(tmp_path) as server:
        folder = OriginFolder(f"{server.url}/model")
        assert not folder.has("tokenizer.json")
        with pytest.raises(RecoveryError, match=r"tokenizer.json: is missing"):
            folder.size_of("tokenizer.json")
        server.status = status
        for ask in (folder.has, folder.size_of):
            with pytest.raises(StorageAwayError, match=rf"tokenizer.json: cannot be read: .*{status}"):
                ask("tokenizer.json")
    with pytest.raises(StorageAwayError, match=r"tokenizer.json: cannot be read: .*127\.0\.0\.1"):
        OriginFolder("http://127.0.0.1:1/model").has("tokenizer.json")


@pytest.mark.parametrize("key", ["rms_norm_eps", "initializer_range", "rope_theta"])
def test_no_rule_lets_nan_pass(key: str) -> None:
    """Whatever made a job, a number that is none stops it."""
    spec = JobSpec(job=JobSection(name="j"), model=replace(MODEL, **{key: math.nan}))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"model.{key}: must be above 0, is nan"):
        check_job(spec, "job")


@pytest.mark.parametrize("named", ["~/model", "file://~/model", "file://{home}/model"])
def test_a_folder_of_this_machine_is_a_path_however_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """Nodes open absolute paths alone, so `~` is the home folder of whoever names it."""
    write_folder(tmp_path / "model")
    monkeypatch.setenv("HOME", str(tmp_path))
    origin, _ = model_opener(tmp_path / "elsewhere")(named.format(home=tmp_path), ())
    assert origin.url == str(tmp_path / "model")


def test_a_whole_folder_is_taken(tmp_path: Path) -> None:
    """Without a fault, each layer and the carried files get a digest."""
    assert len(submitted(write_folder(tmp_path / "model")).origin.parts) == len(layer_names(MODEL)) + 1


def test_a_tensor_of_no_model_is_refused(tmp_path: Path) -> None:
    """A bias that config.json does not mention would be left out silently."""
    folder = write_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(ConfigError, match=r"safetensors: has model.layers.1.\S+, which a model of this config"):
        submitted(folder)


def test_a_node_opens_only_the_shards_of_its_layer(tmp_path: Path) -> None:
    """The other shard is gone, and the layer's tensors are found all the same."""
    folder = write_folder(tmp_path / "model")
    (folder / "two.safetensors").unlink()
    places = find_tensors(OriginFolder(str(folder)), lambda name: (layer_parameter(name, MODEL) or ("",))[0] == "embed")
    assert list(places.tensors) == [FIRST]


def test_a_protocol_without_its_package_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """hf:// needs huggingface_hub."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for name in [name for name in sys.modules if name.startswith("huggingface_hub.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(NoAccessError, match="huggingface_hub"):
        OriginFolder("hf://owner/name")


def test_an_unknown_protocol_is_refused() -> None:
    """A typing error in the URL is one line."""
    with pytest.raises(RecoveryError, match=r"nope://x: cannot be opened: .*nope"):
        OriginFolder("nope://x")


@given(st.binary(max_size=200))
def test_any_header_is_read_or_refused(raw: bytes) -> None:
    """Foreign bytes raise HeaderError and nothing else."""
    with suppress(HeaderError):
        assert tensors_of(len(raw).to_bytes(8, "little") + raw, 8 + len(raw)) == {}


def test_layers_and_names_are_inverse() -> None:
    """Each tensor's name leads back to its layer and parameter; other names lead nowhere."""
    for layer in layer_names(MODEL):
        for name in parameter_shapes(layer, MODEL):
            assert layer_parameter(checkpoint_name(layer, name, MODEL), MODEL) == (layer, name)
    for odd in (
        "x",
        "model",
        "model.",
        "model.layers.1",
        "model.layers.01.x",
        "model.layers.-1.x",
        "transformer.h.0.x",
    ):
        assert layer_parameter(odd, MODEL) is None


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("Qwen/Qwen3-8B", "hf download Qwen/Qwen3-8B --local-dir Qwen3-8B`"),
        ("https://huggingface.co/Qwen/Qwen3-8B/tree/main", 'from = "hf://Qwen/Qwen3-8B"'),
        ("model", "there is no such folder; a model of the Hub is written hf://OWNER/NAME"),
        ("./model", "there is no such folder; name one that has config.json and safetensors"),
        ("one.safetensor", "there is no such folder; did you mean `one.safetensors`?"),
        ("runs/modle", "there is no such folder; did you mean `model`?"),
        ("~nobody-here/model", "'~nobody-here/model' is no path"),
        ("hf://", "names no folder"),
        ("one.safetensors", "is a file; name the folder in which it lies"),
    ],
)
def test_a_name_that_is_no_folder_says_how_to_write_it(tmp_path: Path, name: str, remedy: str) -> None:
    """Names of the Hub look like relative paths, and addresses of its pages like URLs; a mistyped path is no name."""
    (tmp_path / "one.safetensors").touch()
    (tmp_path / "runs/model").mkdir(parents=True)
    with pytest.raises(ConfigError, match=re.escape(remedy)):
        model_opener(tmp_path)(name, ())


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def left_with(*names: str, is_config_gone: bool = False) -> Callable[[Path], None]:
    """Files that people have in place of safetensors."""

    def apply(folder: Path) -> None:
        for path in folder.glob("*.safetensors*"):
            path.unlink()
        if is_config_gone:
            (folder / "config.json").unlink()
        for name in names:
            (folder / name).write_bytes(b"x")

    return apply


@pytest.mark.parametrize(
    ("spoil", "remedy"),
    [
        (left_with("pytorch_model.bin"), r"pytorch_model.bin is not read, .*python -c '.*save_pretrained\S+ /\S+$"),
        (left_with("pytorch_model-00001-of-00002.bin"), r"is not read, because it is pickled; convert it"),
        (left_with("consolidated.safetensors", is_config_gone=False), r"consolidated.safetensors has another form"),
        (left_with("params.json", is_config_gone=True), r"config.json: is missing; params.json has another form"),
        (left_with("m-Q4_K_M.gguf", is_config_gone=True), r"m-Q4_K_M.gguf is GGUF, .*`hf download OWNER/NAME"),
        (left_with("manifest.json", is_config_gone=True), r"a checkpoint of Headway: `headway submit --from /"),
        (left_with("shards.json", is_config_gone=True), r'prepared data: \[data\] source = "/'),
        (left_with(is_config_gone=True), r"config.json: is missing; `hf download OWNER/NAME --local-dir /\S+` gets"),
        (left_with("snapshots", is_config_gone=True), r"the cache of the Hub; name the folder .*/snapshots/REVISION$"),
        (lambda f: (f / "two.safetensors").unlink(), r"two.safetensors: is missing, and \S+ names it; `hf d"),
        (written("one.safetensors", LFS), r"one.safetensors: is a pointer of git-lfs, .*`git lfs pull`"),
        (written("config.json", LFS), r"config.json: is a pointer of git-lfs"),
        (written(INDEX, LFS), r"index.json: is a pointer of git-lfs"),
        (
            edit("config.json", lambda c: c.update(quantization_config={"quant_method": "gptq"})),
            r"quantization_config = .*gptq.* is not supported; take the model without it .*quantize",
        ),
        (written("adapter_config.json", b"{}"), r"has adapter_config.json and model\S+; delete the one with which"),
        (edit("config.json", lambda c: c.update(head_dim=7)), r"config.json: heads of 7 values are odd"),
        (edit("config.json", lambda c: c.update(vocab_size=2**21)), r"config.json:vocab_size: must be at most 1048576"),
    ],
)
def test_a_folder_as_people_have_it_says_what_gets_further(
    tmp_path: Path, spoil: Callable[[Path], None], remedy: str
) -> None:
    """Other formats, half a download, quantized weights: one line, at the first look of any command."""
    spoil(write_folder(tmp_path / "model"))
    with pytest.raises(ConfigError, match=remedy) as refused:
        model_opener(tmp_path)("model", ())
    assert "\n" not in str(refused.value)


def test_a_snapshot_of_the_hubs_cache_is_a_folder(tmp_path: Path) -> None:
    """Its files are links to blobs: the same digests. A broken link is named, before the submission and after it."""
    plain = write_folder(tmp_path / "plain")
    snapshot, blobs = tmp_path / "cache/snapshots/abc", tmp_path / "cache/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(plain.iterdir())):
        shutil.copy(path, blobs / f"{number}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    spec = submitted(snapshot)
    assert [part.checksum for part in spec.origin.parts] == [part.checksum for part in submitted(plain).origin.parts]
    blobs.rename(tmp_path / "cache/moved")
    link = r"is a link to \.\./\.\./blobs/\d, which is not there; download it again"
    with pytest.raises(RecoveryError, match=rf"/snapshots/abc/\S+: {link}"):
        list(read_part(spec, "embed"))
    with pytest.raises(ConfigError, match=rf"/snapshots/abc/\S+: {link}"):
        submitted(snapshot)
    (tmp_path / "cache/moved").rename(blobs)
    for name in ("config.json", "one.safetensors", INDEX):
        blob = (snapshot / name).resolve()
        raw = blob.read_bytes()
        blob.unlink()
        with pytest.raises(ConfigError, match=rf"{name}: {link}"):
            submitted(snapshot)
        blob.write_bytes(raw)


def test_a_header_of_many_experts_costs_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its tensors stands for a thousand matrices: the reading stops at a number, not at the memory."""
    monkeypatch.setattr(tensor_places, "MAX_TENSORS", 3000)
    folder = write_folder(tmp_path / "model", model=["lm_head.weight"])
    size = MOST_EXPERTS * 2
    entry = {"dtype": "I8", "shape": [MOST_EXPERTS, 2, 1]}
    table = {
        f"model.layers.{layer}.mlp.experts.gate_up_proj": {**entry, "data_offsets": [layer * size, (layer + 1) * size]}
        for layer in range(3)
    }
    head = json.dumps(table).encode()
    (folder / INDEX).unlink()
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + bytes(3 * size))
    with pytest.raises(RecoveryError, match=r"model.safetensors: has more than 3000 tensors"):
        find_tensors(OriginFolder(str(folder)))


def test_an_index_of_many_tensors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its number, before any file is looked for."""
    monkeypatch.setattr(tensor_places, "MAX_TENSORS", 100)
    folder = write_folder(tmp_path / "model")
    (folder / INDEX).write_text(json.dumps({"weight_map": {f"t{number}": "a.safetensors" for number in range(101)}}))
    with pytest.raises(RecoveryError, match="weight_map names 101 tensors; at most 100 are read"):
        find_tensors(OriginFolder(str(folder)))


def test_a_command_quotes_a_folder_with_spaces() -> None:
    """The line is meant to be pasted into a shell."""
    assert "--local-dir '/my models/a'" in instead((), "/my models/a")
