"""A model's folder that transformers has written, as `[model]`, as digests, as files of boundary 0 and as weights."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headway.daemon.base.errors import ConfigError, DamagedCopyError
from headway.daemon.blobs.fetch import source_at
from headway.daemon.blobs.file_threads import FileThreads
from headway.daemon.cluster.records import SpecRecord
from headway.daemon.cluster.state_key import CARRIED_PART
from headway.daemon.decide.admission import why_refused
from headway.daemon.jobs.job import JobSpec
from headway.daemon.jobs.job_file import parse_job
from headway.daemon.models.model_folder import read_model, write_model
from headway.daemon.models.origin_config import model_opener, whole_path
from headway.daemon.models.origin_model import initial_weights_of, with_parts
from headway.daemon.models.origin_parts import carried_of, read_part
from headway.optim.layer_optimizer import optimizer_factory
from headway.stages.ids import Boundary, LayerName
from headway.stages.model.hugging_face import checkpoint_name
from headway.stages.model.initial_weights import frozen_beside
from headway.stages.state.layer_file import read_layer
from headway.stages.state.layer_state import frozen_weights
from headway.stages.state.state_file import content_checksum, read_state

pytest.importorskip("transformers")

from tests.rigs.stored_files import fetch_from
from tests.rigs.tiny_models import FAMILIES, write_tiny_model


@pytest.fixture(scope="module", params=["one file", "shards", "bfloat16", "float16"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each layout and dtype."""
    path: Path = tmp_path_factory.mktemp("origin")
    if request.param == "shards":
        return write_tiny_model(path, model_type="qwen3", head_dim=16, shard_size="30KB")
    dtype = getattr(torch, request.param) if "float" in request.param else torch.float32
    return write_tiny_model(path, dtype=dtype)


def job_from(folder: Path, *, text: str = "") -> JobSpec:
    """The job of a file that names the folder."""
    written = f'[job]\nname = "j"\n[model]\nfrom = "{folder.name}"\n{text}'
    return parse_job(written, "j.toml", open_model=model_opener(folder.parent))


def theirs(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder, read by safetensors itself."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_the_config_becomes_the_model(folder: Path) -> None:
    """A relative `from` counts from the job file; the record names the whole path."""
    spec = job_from(folder)
    assert (spec.model.hidden_size, spec.model.num_hidden_layers) == (32, 3)
    assert spec.origin.url == str(folder)


def test_the_weights_are_those_of_the_folder(folder: Path) -> None:
    """Each parameter of each layer in fp32 has the bits of transformers' tensor, cast."""
    spec = job_from(folder)
    read = initial_weights_of(spec)
    assert read is not None
    ours = {
        checkpoint_name(layer, name, spec.model): tensor
        for layer in spec.layers
        for name, tensor in read(layer).items()
    }
    expected = theirs(folder)
    assert ours.keys() == expected.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected[name].float()), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_loads_from_its_part(folder: Path, tmp_path: Path, dtype: str) -> None:
    """A part is a state file of boundary 0 with the recorded digest; a worker loads it with a fresh optimizer."""
    spec = job_from(folder, text=f'[train]\ndtype = "{dtype}"\n')
    spec = with_parts(spec)
    assert not why_refused(SpecRecord(spec=spec, uid="u"), "j")
    read = initial_weights_of(spec)
    assert read is not None
    for layer in spec.layers:
        path = tmp_path / f"{layer}.safetensors"
        path.write_bytes(b"".join(read_part(spec, layer)))
        digest = spec.origin.digest_of(layer)
        assert digest is not None
        assert (path.stat().st_size, content_checksum(path)) == (digest.size_bytes, digest.checksum)
        state = read_layer(
            path,
            LayerName(layer),
            job="j",
            boundary=Boundary(0),
            model=spec.model,
            train=spec.train,
            device="cpu",
            optimizer_factory=optimizer_factory(spec.optim, num_batches=1, delay=spec.train.delay),
        )
        assert state.boundary == 0
        for name, tensor in read(layer).items():
            assert torch.equal(state.weights()[name], tensor), name


def test_a_part_can_be_read_from_any_byte(folder: Path) -> None:
    """A reader that continues gets the rest of the bytes, whether it stopped in the header or in the data."""
    spec = with_parts(job_from(folder))
    for part in ("block.1", CARRIED_PART):
        whole = b"".join(read_part(spec, part))
        for offset in (0, 5, len(whole) // 2, len(whole) - 1, len(whole)):
            assert b"".join(read_part(spec, part, offset=offset)) == whole[offset:]


@pytest.mark.parametrize("quantizer", ["nf4", "int8"])
def test_a_quantized_part_has_the_codes(folder: Path, tmp_path: Path, quantizer: str) -> None:
    """Its checksum is that of the codes that the plain loop makes, and it can be read from any byte."""
    spec = job_from(folder, text=f'[adapter]\nrank = 2\nquantize = "{quantizer}"\n')
    plain, spec = with_parts(replace(spec, model=spec.model.base)), with_parts(spec)
    read, name, path = initial_weights_of(spec), LayerName("block.1"), tmp_path / "part.safetensors"
    assert read is not None
    path.write_bytes(whole := b"".join(read_part(spec, name)))
    digest, unquantized = spec.origin.digest_of(name), plain.origin.digest_of(name)
    assert digest is not None
    assert unquantized is not None
    assert content_checksum(path) == digest.checksum
    assert digest.size_bytes < unquantized.size_bytes
    loaded = frozen_weights(name, spec.model, spec.train, seed=0, device="cpu", given=read_state(path)[1])
    expected = frozen_beside(read(name), name, spec.model, spec.train, device="cpu")
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in expected.items())
    for offset in range(0, len(whole), len(whole) // 16 + 1):
        assert b"".join(read_part(spec, name, offset=offset)) == whole[offset:]


def test_the_carried_part_has_the_config(folder: Path, tmp_path: Path) -> None:
    """The files that an export carries over are bytes of one more part."""
    spec = with_parts(job_from(folder))
    path = tmp_path / "origin.safetensors"
    path.write_bytes(b"".join(read_part(spec, CARRIED_PART)))
    _, tensors = read_state(path)
    assert bytes(tensors["file/config.json"].numpy()) == (folder / "config.json").read_bytes()


def test_an_altered_folder_is_noticed(tmp_path: Path) -> None:
    """One weight changes after the submission: the part's checksum differs from the record's."""
    folder = write_tiny_model(tmp_path / "model")
    spec = with_parts(job_from(folder))
    file = folder / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    changed = with_parts(replace(spec, origin=replace(spec.origin, parts=())))
    differing = [
        before.name for before, after in zip(spec.origin.parts, changed.origin.parts, strict=True) if before != after
    ]
    assert len(differing) == 1
    digest = spec.origin.digest_of(differing[0])
    assert digest is not None
    url, threads = spec.origin.url, FileThreads("tests")
    source = source_at(url, url, threads, lambda offset, _: read_part(spec, differing[0], offset=offset))
    with pytest.raises(DamagedCopyError):
        fetch_from(source, digest, tmp_path / "part")
    assert not (tmp_path / "part").exists()


def test_a_key_that_says_something_else_is_refused(tmp_path: Path) -> None:
    """A field of [model] may stand beside `from` if it agrees."""
    folder = write_tiny_model(tmp_path / "model")
    assert job_from(folder, text="hidden_size = 32\n").model.hidden_size == 32
    with pytest.raises(ConfigError, match=r"j.toml:model.hidden_size: is 64, but config.json of .* gives 32"):
        job_from(folder, text="hidden_size = 64\n")
    assert job_from(folder, text="head_dim = 8\n").model.head_width == 8  # which the config says by other keys
    with pytest.raises(ConfigError, match=r"j.toml:model.head_dim: is 7, but config.json of .* gives 8; leave it out"):
        job_from(folder, text="head_dim = 7\n")
    with pytest.raises(
        ConfigError, match=r"rope_scaling: is rope_type = linear, factor = 2.0, but .* = default; leave"
    ):
        job_from(folder, text='rope_scaling = { rope_type = "linear", factor = 2.0 }\n')
    with pytest.raises(
        ConfigError, match=r"config.json: has no key 'nope', which \[model\] ignore names; leave it out"
    ):
        job_from(folder, text='ignore = ["nope"]\n')


def test_a_folder_can_be_named_outside_of_the_job_file(tmp_path: Path) -> None:
    """`submit --model` needs no [model] table; a table that names another folder is refused."""
    folder = write_tiny_model(tmp_path / "model")
    opener = model_opener(tmp_path)
    text = '[job]\nname = "j"\n'
    spec = parse_job(text, "j", open_model=opener, model_from=whole_path(str(folder)))
    assert spec.origin.url == str(folder)
    with pytest.raises(ConfigError, match=r"j:model.from: is 'other', and --model is"):
        parse_job(f'{text}[model]\nfrom = "other"\n', "j", open_model=opener, model_from=str(folder))


def test_a_tied_matrix_is_read_for_both_ends_and_written_once(tmp_path: Path) -> None:
    """The folder has it as the embedding; import → export without training has the folder's bytes."""
    folder = write_tiny_model(tmp_path / "model", tie_word_embeddings=True, shard_size="20KB")
    spec = job_from(folder)
    read = initial_weights_of(spec)
    assert read is not None
    weights = {layer: read(layer) for layer in spec.layers}
    assert torch.equal(weights["embed"]["weight"], weights["head"]["lm_head.weight"])
    out = tmp_path / "out"
    write_model(out, spec.model, weights=weights, sequence_length=16, carried=carried_of(spec))
    assert {path.name: path.read_bytes() for path in out.glob("*.safetensors")} == {
        path.name: path.read_bytes() for path in folder.glob("*.safetensors")
    }
    assert torch.equal(read_model(out).weights["head"]["lm_head.weight"], weights["embed"]["weight"])


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_is_read_and_written_under_its_names(tmp_path: Path, model_type: str) -> None:
    """Import → export without training has the bytes of each family's own files, weights and config.json."""
    folder = write_tiny_model(tmp_path / "model", model_type=model_type, **FAMILIES[model_type])
    spec = job_from(folder)
    read = initial_weights_of(spec)
    assert read is not None
    out = tmp_path / "out"
    weights = {layer: read(layer) for layer in spec.layers}
    write_model(out, spec.model, weights=weights, sequence_length=16, carried=carried_of(spec))
    assert (out / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    ours, theirs = (json.loads((each / "config.json").read_text()) for each in (out, folder))
    assert ours == theirs | {"producer": "headway"}
    for layer, parameters in read_model(out).weights.items():
        assert all(torch.equal(tensor, weights[layer][name]) for name, tensor in parameters.items()), layer


def test_a_command_that_reads_no_folder_says_so() -> None:
    """parse_job alone opens nothing."""
    with pytest.raises(ConfigError, match=r"j:model.from: names a folder"):
        parse_job('[job]\nname = "j"\n[model]\nfrom = "x"\n', "j")
    with pytest.raises(ConfigError, match=r"j:model.from: names no folder"):
        parse_job('[job]\nname = "j"\n[model]\nfrom = 3\n', "j")
    with pytest.raises(ConfigError, match=r"j:origin: unknown section"):
        parse_job('[job]\nname = "j"\n[origin]\nurl = "x"\n', "j")


def with_redundant_head(folder: Path, *, is_changed: bool) -> Path:
    """A tied model whose file has the matrix a second time, as Qwen3-0.6B has it."""
    write_tiny_model(folder, tie_word_embeddings=True)
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1, -1] += is_changed
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_an_equal_second_copy_of_a_tied_matrix_is_dropped(tmp_path: Path) -> None:
    """`lm_head.weight` beside the embedding, the same bytes → the model without it; its export opens as the model."""
    folder = with_redundant_head(tmp_path / "model", is_changed=False)
    spec = with_parts(job_from(folder))
    plain = with_parts(job_from(write_tiny_model(tmp_path / "plain", tie_word_embeddings=True)))
    parts = {part.name: part.checksum for part in spec.origin.parts if part.name in spec.layers}
    assert parts == {part.name: part.checksum for part in plain.origin.parts if part.name in plain.layers}
    read = initial_weights_of(spec)
    assert read is not None
    weights = {layer: read(layer) for layer in spec.layers}
    out = tmp_path / "out"
    write_model(out, spec.model, weights=weights, sequence_length=16, carried=carried_of(spec))
    transformers = pytest.importorskip("transformers")
    theirs, ours = (transformers.AutoModelForCausalLM.from_pretrained(each).state_dict() for each in (folder, out))
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_a_changed_second_copy_of_a_tied_matrix_is_refused(tmp_path: Path) -> None:
    """One number differs → both are named, before anything is planned."""
    folder = with_redundant_head(tmp_path / "model", is_changed=True)
    with pytest.raises(ConfigError, match=r"model.embed_tokens.weight and lm_head.weight, which differ, .*set it to f"):
        job_from(folder)


@pytest.mark.parametrize("is_changed", [False, True])
def test_shards_of_an_index_beside_a_single_file(tmp_path: Path, is_changed: bool) -> None:
    """Equal → the single file is read, as transformers does; stale shards → refused, naming both."""
    folder = write_tiny_model(tmp_path / "model", shard_size="30KB")
    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + is_changed
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if is_changed:
        with pytest.raises(
            ConfigError, match=r"model.safetensors and the shards of .*index.json, which differ in \S*norm"
        ):
            job_from(folder)
        return
    read = initial_weights_of(with_parts(job_from(folder)))
    assert read is not None
    assert torch.equal(read("head")["norm.weight"], tensors["model.norm.weight"])
    carried = carried_of(job_from(folder))
    assert carried is not None
    assert set(carried.headers) == {"model.safetensors"}
    assert "model.safetensors.index.json" not in carried.files


def test_an_index_that_lacks_tensors_of_a_shard(tmp_path: Path) -> None:
    """They are read, as transformers reads them, also for one layer by itself."""
    folder = write_tiny_model(tmp_path / "model", shard_size="30KB")
    index = folder / "model.safetensors.index.json"
    raw, whole = json.loads(index.read_text()), with_parts(job_from(folder))
    for name in [name for name in raw["weight_map"] if name.startswith("model.layers.1.mlp.")]:
        del raw["weight_map"][name]
    index.write_text(json.dumps(raw))
    spec = with_parts(job_from(folder))
    assert spec.origin.digest_of("block.1") == whole.origin.digest_of("block.1")
    assert b"".join(read_part(spec, "block.1")) == b"".join(read_part(whole, "block.1"))


def test_an_index_without_its_shards_is_no_second_set(tmp_path: Path) -> None:
    """The shards of an older save are gone, their index is not → the single file is the model."""
    folder = write_tiny_model(tmp_path / "model", shard_size="30KB")
    tensors = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    for path in folder.glob("*.safetensors"):
        path.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    read = initial_weights_of(with_parts(job_from(folder)))
    assert read is not None
    assert torch.equal(read("head")["norm.weight"], tensors["model.norm.weight"])
