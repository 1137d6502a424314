"""The content of a job file, and the one line for each mistake."""

import dataclasses
import json
import re
import tomllib
from pathlib import Path
from typing import Literal, get_type_hints

import pytest

from headway.daemon.base.errors import ConfigError
from headway.daemon.jobs.job import JobSection, JobSpec
from headway.daemon.jobs.job_file import parse_job, read_job_file
from headway.daemon.jobs.resolve import resolve_job
from headway.optim.spec import OPTIMIZERS, GroupSpec
from headway.stages.spec import AdapterSpec

DOCS = Path(__file__).resolve().parents[4] / "docs" / "jobs"
OTHER_GROUPS = [
    tomllib.loads(f"group = {line}")["group"]
    for line in re.findall(r"^#   (\{ name = .*\})$", (DOCS / "reference.toml").read_text(), re.MULTILINE)
]
"""What its comments show of the optimizers that it does not use."""
NAMED = '[job]\nname = "tiny"\n'
QWEN35 = (
    "[model]\nqk_norm = true\nzero_centered_norms = true\nattn_output_gate = true\n"
    'layer_types = ["linear_attention", "full_attention"]\n'
    "linear_num_key_heads = 2\nlinear_num_value_heads = 2\nlinear_key_head_dim = 8\nlinear_value_head_dim = 8\n"
)

ON_EXPERTS = NAMED + "[model]\nqk_norm = true\nnum_experts = 4\nnum_experts_per_tok = 2\nmoe_intermediate_size = 8\n"
GPT_OSS = ON_EXPERTS.replace("qk_norm = true", "intermediate_size = 8\nnorm_topk_prob = true") + (
    "attention_sinks = true\nexpert_bias = true\nswiglu_limit = 7.0\nswiglu_alpha = 1.702\n"
)
REFUSED = {
    "unknown section": ('[jb]\nname = "x"', "job.toml:jb: unknown section; did you mean `job`?"),
    "unknown key": ('[job]\nname = "x"\nsede = 3', "job.toml:job.sede: unknown key; did you mean `seed`?"),
    "key of another section": (NAMED + "[model]\nbatches = 3", "model.batches: unknown key; it belongs in [train]"),
    "key like no other": (NAMED + "[data]\nzzz = 3", "data.zzz: unknown key; there are source, sha256"),
    "section that is no table": ("job = 3", "job.toml:job: expected a table, got an integer"),
    "no name": ("[job]\nseed = 1", "job.toml:job: `name` is missing"),
    "no section at all": ("", "job.toml:job: `name` is missing"),
    "not TOML": ("job]", "job.toml: not valid TOML"),
    "string for a number": (NAMED + '[train]\nbatches = "3"', "train.batches: expected int, got str ('3')"),
    "true for a number": (NAMED + "[train]\nbatches = true", "train.batches: expected int, got bool (true)"),
    "fraction for a count": (NAMED + "[train]\nbatches = 1.5", "train.batches: expected int, got float (1.5)"),
    "not a number": (NAMED + "[train]\nclip_norm = nan", "train.clip_norm: expected a finite number, got nan"),
    "adapter under another name": (NAMED + "[lora]\nrank = 8", "lora: unknown section; did you mean `adapter`?"),
    "adapter inside the model": (
        NAMED + "[model.adapter]\nrank = 8",
        "model.adapter: unknown key; it is a section of its own: [adapter]",
    ),
    "adapter without a rank": (NAMED + "[adapter]\nalpha = 16", "job.toml:adapter.rank: is missing: without it all"),
    "adapter of rank 0": (NAMED + "[adapter]\nrank = 0\nalpha = 8", "adapter.rank: is 0, so there is no adapter"),
    "PEFT's name of the rank": (NAMED + "[adapter]\nr = 8", "adapter.r: unknown key; did you mean `rank`?"),
    "layers of a model": (NAMED + "[model]\nlayers = 2", "unknown key; did you mean `num_hidden_layers`?"),
    "PEFT's name of alpha": (NAMED + "[adapter]\nrank = 8\nlora_alpha = 8", "unknown key; did you mean `alpha`?"),
    "PEFT's name of all matrices": (
        NAMED + '[adapter]\nrank = 8\ntargets = ["all-linear"]',
        "adapter.targets[0]: all-linear is what an empty list means; leave targets out",
    ),
    "target that matches nothing": (
        NAMED + '[adapter]\nrank = 8\ntargets = ["q_proj", "lm_head"]',
        "adapter.targets[1]: 'lm_head' is no matrix of this model's blocks; there are q_proj, k_proj,",
    ),
    "target with a path": (
        NAMED + '[adapter]\nrank = 8\ntargets = ["self_attn.q_proj"]',
        "adapter.targets[0]: 'self_attn.q_proj' is no matrix of this model's blocks; did you mean `q_proj`?",
    ),
    "target named twice": (NAMED + '[adapter]\nrank = 8\ntargets = ["q_proj", "q_proj"]', "q_proj is named twice"),
    "dropout": (NAMED + "[adapter]\nrank = 8\ndropout = 1.0", "adapter.dropout: must be at most 0.9375, is 1"),
    "half of what PEFT joins": (
        ON_EXPERTS + '[adapter]\nrank = 8\ntargets = ["up_proj"]',
        "adapter.targets: gate_proj and up_proj of experts are one matrix for PEFT; name both",
    ),
    "adapters on experts that lie in one tensor": (
        GPT_OSS + '[adapter]\nrank = 8\ntargets = ["gate_proj", "up_proj"]',
        "adapter.targets: PEFT has no adapter beside experts that lie in one tensor, transposed; name matrices of att",
    ),
    "a limit without its factor": (
        GPT_OSS.replace("swiglu_alpha = 1.702\n", ""),
        "model.swiglu_limit: is used with swiglu_alpha; set both, or leave both out",
    ),
    "adapters that PEFT would drop": (
        ON_EXPERTS.replace("qk_norm", "qkv_bias")
        + 'num_shared_experts = 1\nshared_expert_gate = true\n[adapter]\nrank = 8\ntargets = ["down_proj"]',
        "adapter.targets: PEFT drops the adapters of shared experts, or of the others; name matrices of attention",
    ),
    "a scale that PEFT would alter": (
        ON_EXPERTS + '[adapter]\nrank = 8\nrslora = true\ntargets = ["down_proj"]',
        "adapter.rslora: PEFT scales gate_proj and up_proj of experts by another factor; write alpha times √rank",
    ),
    "dropout on experts": (
        ON_EXPERTS + '[adapter]\nrank = 8\ndropout = 0.1\ntargets = ["down_proj"]',
        "adapter.dropout: PEFT has none beside experts; set it to 0, or name attention alone",
    ),
    "alpha of 0": (NAMED + "[adapter]\nrank = 8\nalpha = 0", "adapter.alpha: must be above 0, is 0.0"),
    "unknown schedule": (NAMED + '[train]\nschedule = "1f1"', "did you mean `1f1b`?"),
    "unknown optimizer": (NAMED + '[optim]\nrest = { name = "adamm" }', "optim.rest.name: 'adamm' is not one of muon,"),
    "group without a name": (NAMED + "[optim]\nrest = { lr = 0.1 }", "job.toml:optim.rest: `name` is missing"),
    "setting of another optimizer": (
        NAMED + '[optim]\nmatrices = { name = "adamw", momentum = 0.9 }',
        "optim.matrices.momentum: adamw does not use `momentum`; leave it out "
        "(it uses betas, eps, lr, momentum_dtype, weight_decay)",
    ),
    **{
        f"{name} for the rest": (
            NAMED + f'[optim]\nrest = {{ name = "{name}" }}',
            f"{name} takes 2-D weights inside the blocks only; choose one of adamw, adan, mars, lion, sgd for the rest",
        )
        for name in ("normuon", "lionmuon", "soap")
    },
    "a second beta of one": (NAMED + '[optim]\nmatrices = { name = "normuon", beta2 = 1.0 }', "optim.matrices.beta2"),
    "a third beta of one": (
        NAMED + '[optim]\nrest = { name = "adan", beta3 = 1.0 }',
        "optim.rest.beta3: must be at most 0.999, is 1.0",
    ),
    "bases that never turn": (
        NAMED + '[optim]\nmatrices = { name = "soap", precondition_frequency = 0 }',
        "optim.matrices.precondition_frequency: must be at least 1, is 0",
    ),
    "momentum of soap": (
        NAMED + '[optim]\nmatrices = { name = "soap", momentum = 0.9 }',
        "optim.matrices.momentum: soap does not use `momentum`; leave it out (it uses betas, eps, lr, "
        "max_precondition_dim, momentum_dtype, precondition_frequency, weight_decay)",
    ),
    "coefficients of what does not iterate": (
        NAMED + '[optim]\nmatrices = { name = "adamw", newton_schulz_coefficients = "polar_express" }',
        "optim.matrices.newton_schulz_coefficients: adamw does not use `newton_schulz_coefficients`; leave it out",
    ),
    "an adjusted rate of what has its own": (
        NAMED + '[optim]\nmatrices = { name = "lionmuon", adjust_lr = "original" }',
        "optim.matrices.adjust_lr: lionmuon does not use `adjust_lr`; leave it out",
    ),
    "an adjusted rate for the rest": (
        NAMED + '[optim]\nrest = { name = "lion", adjust_lr = "match_rms_adamw" }',
        "optim.rest.adjust_lr: lion does not use `adjust_lr`; leave it out",
    ),
    "unknown adjustment": (
        NAMED + '[optim]\nmatrices = { name = "muon", adjust_lr = "match_rms_adam" }',
        "did you mean `match_rms_adamw`?",
    ),
    "muon for the rest": (NAMED + '[optim]\nrest = { name = "muon" }', "optim.rest.name: muon takes 2-D weights"),
    "beta of one": (
        NAMED + '[optim]\nrest = { name = "adamw", betas = [0.9, 1.0] }',
        "optim.rest.betas: each must be at least 0 and below 1, got 1.0",
    ),
    "three betas": (
        NAMED + '[optim]\nrest = { name = "adamw", betas = [0.9, 0.9, 0.9] }',
        "optim.rest.betas: expected",
    ),
    "momentum of one": (NAMED + '[optim]\nmatrices = { name = "muon", momentum = 1.0 }', "optim.matrices.momentum"),
    "no learning rate": (
        NAMED + '[optim]\nrest = { name = "sgd", lr = 0.0 }',
        "optim.rest.lr: must be above 0, is 0.0",
    ),
    "negative decay": (
        NAMED + '[optim]\nrest = { name = "sgd", weight_decay = -1 }',
        "optim.rest.weight_decay: must be",
    ),
    "dtype of a momentum that is not there": (
        NAMED + '[optim]\nrest = { name = "sgd", momentum = 0.0, nesterov = false, momentum_dtype = "bfloat16" }',
        "optim.rest.momentum_dtype: sgd has no momentum here; leave it out",
    ),
    "halves of compiled blocks": (
        NAMED + "[train]\ncompile = true\n[placement]\nsplit_blocks = true",
        "placement.split_blocks: true is refused with train.compile, whose codes are of whole blocks",
    ),
    "halves beside coded links": (
        NAMED + '[train]\nwire = "bf16"\n[placement]\nsplit_blocks = true',
        'placement.split_blocks: true is refused with train.wire = "bf16"',
    ),
    "halves of a plug-in": (
        NAMED + '[model]\nblock = "my_things.blocks:Block"\n[placement]\nsplit_blocks = true',
        "placement.split_blocks: true is refused with a block of the job's own",
    ),
    "one product without chunks": (
        NAMED + '[train]\nloss_gradient = "whole"',
        "train.loss_gradient: is not used without loss_chunk and a head that is trained; leave it out",
    ),
    "negative error feedback": (NAMED + "[optim]\nerror_feedback = -1.0", "optim.error_feedback: must be at least 0"),
    "heads that do not divide": (
        NAMED + "[model]\nnum_attention_heads = 7",
        "model.num_attention_heads: 7 heads do not divide hidden_size 256; choose a divisor",
    ),
    "key heads that do not divide": (
        NAMED + "[model]\nnum_key_value_heads = 3",
        "model.num_key_value_heads: 3 key/value heads do not divide num_attention_heads 8; choose a divisor",
    ),
    "odd head": (
        NAMED + "[model]\nhidden_size = 24",
        "model.hidden_size: hidden_size 24 over 8 heads gives a head of 3; rotary positions need an even one",
    ),
    "experts without number": (
        NAMED + "[model]\nmoe_intermediate_size = 8",
        "model.moe_intermediate_size: is not used without num_experts; leave it out",
    ),
    "too many experts a token": (
        NAMED + "[model]\nnum_experts = 4\nnum_experts_per_tok = 5\nmoe_intermediate_size = 8",
        "model.num_experts_per_tok: 5 experts a token of 4; choose 1 to 4",
    ),
    "experts without width": (
        NAMED + "[model]\nnum_experts = 4\nnum_experts_per_tok = 2",
        "model.moe_intermediate_size: must be above 0 with num_experts",
    ),
    "a mixture of no family": (
        NAMED + "[model]\nnum_experts = 4\nnum_experts_per_tok = 2\nmoe_intermediate_size = 8\nrouter_bias = true",
        "model: no family of Hugging Face has these options of a model together",
    ),
    "a router's loss without router": (
        NAMED + "[train]\nrouter_z_loss = 0.1",
        "train.router_z_loss: is not used without model.num_experts; leave it out",
    ),
    "compiled experts": (
        NAMED
        + "[model]\nqk_norm = true\nnum_experts = 4\nnum_experts_per_tok = 2\nmoe_intermediate_size = 8\n"
        + "[train]\ncompile = true",
        "train.compile: true is refused with experts",
    ),
    "linear attention without convolution": (
        NAMED + QWEN35,
        "model.linear_conv_kernel_dim: must be above 0 with linear_attention in layer_types",
    ),
    "heads of linear attention that no block has": (
        NAMED + "[model]\nlinear_num_key_heads = 2",
        "model.linear_num_key_heads: is not used without linear_attention in layer_types; leave it out",
    ),
    "small vocabulary": (
        NAMED + "[model]\nvocab_size = 100",
        "model.vocab_size: 100 is too small for data of 256 tokens",
    ),
    "more groups than microbatches": (
        NAMED + "[train]\nreduction_groups = 9",
        "train.reduction_groups: 9 groups cannot be filled by 8 microbatches; set it to 8 or less",
    ),
    "no batches": (NAMED + "[train]\nbatches = 0", "train.batches: must be at least 1, is 0"),
    "no microbatches": (NAMED + "[train]\nmicrobatches = 0", "train.microbatches: must be at least 1, is 0"),
    "no sequences": (NAMED + "[train]\nmicrobatch_size = 0", "train.microbatch_size: must be at least 1, is 0"),
    "no tokens": (NAMED + "[train]\nsequence_length = 0", "train.sequence_length: must be at least 1, is 0"),
    "no threads": (NAMED + "[train]\nthreads = 0", "train.threads: must be at least 1, is 0"),
    "no layers": (NAMED + "[model]\nnum_hidden_layers = 0", "model.num_hidden_layers: must be at least 1, is 0"),
    "negative clip": (NAMED + "[train]\nclip_norm = -1.0", "train.clip_norm: must be at least 0, is -1.0"),
    "negative seed": ('[job]\nname = "x"\nseed = -1', "job.seed: must be at least 0, is -1"),
    "name with spaces": ('[job]\nname = "My Job"', "'my-job' would do"),
    "name with a slash": ('[job]\nname = "a/b"', "job.name: 'a/b' is not 1 to 63"),
    "name too long": (f'[job]\nname = "{"x" * 64}"', "job.name"),
    "no source": (NAMED + '[data]\nsource = ""', "data.source: is empty"),
    "more nodes than layers": (NAMED + "[placement]\nmin_nodes = 11", "placement.min_nodes: 11 nodes cannot share 10"),
    "most below least": (
        NAMED + "[placement]\nmin_nodes = 3\nmax_nodes = 2",
        "placement.max_nodes: 2 is below min_nodes",
    ),
    "more replicas than groups": (
        NAMED + "[train]\nreduction_groups = 2\n[placement]\nreplicas = [1, 3]",
        "placement.replicas: 3 replicas cannot share 2 reduction groups; set train.reduction_groups to 3",
    ),
    "a stage of nobody": (NAMED + "[placement]\nreplicas = [1, 0]", "placement.replicas: each stage has at least 1"),
    "more stages than layers": (
        NAMED + "[placement]\nreplicas = [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]",
        "placement.replicas: names 11 stages, but 10 layers and",
    ),
    "patience without evaluations": (NAMED + "[train]\neval_patience = 2", "eval_patience: needs evaluations; set"),
    "preferences without a frozen model": (
        NAMED + '[train]\nobjective = "dpo"',
        'train.objective: "dpo" compares with the frozen model, so it needs',
    ),
    "preferences of joined documents": (
        NAMED + '[train]\nobjective = "dpo"\ndocuments = "joined"\n[adapter]\nrank = 2',
        'train.documents: is "joined", and pairs are documents of packed rows; leave it out',
    ),
    "compiled preferences": (
        NAMED + '[train]\nobjective = "dpo"\ncompile = true\n[adapter]\nrank = 2',
        'train.compile: true is refused with objective = "dpo"',
    ),
    "beta without preferences": (
        NAMED + "[train]\ndpo_beta = 0.2",
        'train.dpo_beta: is not used without objective = "dpo"',
    ),
    "batches without delay in a job that has none": (
        NAMED + '[train]\nschedule = "1f1b"\nsync_batches = 3',
        'train.sync_batches: is not used without schedule = "2bw"; leave it out',
    ),
    "delta without patience": (
        NAMED + "[train]\neval_every = 2\neval_min_delta = 0.1",
        "train.eval_min_delta: is not used without eval_patience",
    ),
    "negative delta": (
        NAMED + "[train]\neval_every = 2\neval_patience = 2\neval_min_delta = -0.1",
        "train.eval_min_delta: must be at least 0, is -0.1",
    ),
    "delta that is no number": (
        NAMED + "[train]\neval_every = 2\neval_patience = 2\neval_min_delta = nan",
        "train.eval_min_delta: expected a finite number, got nan",
    ),
    "evaluation": (NAMED + "[train]\neval_microbatches = 9", "eval_microbatches: 9 held-out microbatches are computed"),
    "recomputation of a kind that there is not": (
        NAMED + '[train]\nrecompute = "blocks"',
        "train.recompute: 'blocks' is not one of auto, none, elementwise, attention, block; did you mean `block`?",
    ),
    "lossy wire": (
        NAMED + '[train]\nwire = "int8"\nexactness = "required"',
        'train.wire: "int8" makes the bits depend on the cuts, which exactness = "required" does not allow',
    ),
    "what follows the end": (
        NAMED + '[optim]\nafter_end = "restart"',
        "optim.after_end: 'restart' is not one of \"\", floor, warm_up_again",
    ),
    "an ignored key twice": (NAMED + '[model]\nfrom = "m"\nignore = ["a", "a"]', "model.ignore: names 'a' twice"),
    "an ignored key of no folder": (
        NAMED + '[model]\nignore = ["a"]',
        "names keys of the config.json of `from`, which",
    ),
    "compression between what": (NAMED + '[train]\nwire_between = "nodes"', "'nodes' is not one of sites, stages"),
    "no copy": (NAMED + "[fault]\ncopies = 0", "fault.copies: must be at least 1, is 0"),
    "too many copies": (NAMED + "[fault]\ncopies = 17", "fault.copies: must be at most 16, is 17"),
    "no checkpoint kept": (NAMED + "[fault]\ncheckpoints_kept = 0", "fault.checkpoints_kept: must be at least 1"),
    "link without time": (NAMED + "[fault]\nlink_timeout_s = 0.5", "fault.link_timeout_s: must be at least 1, is 0.5"),
    "snapshots before the start": (NAMED + "[fault]\nsnapshot_every = -1", "fault.snapshot_every: must be at least 0"),
    "what to do at nan": (
        NAMED + '[fault]\nnon_finite = "halt"',
        "fault.non_finite: 'halt' is not one of stop, continue",
    ),
}


@pytest.mark.parametrize(("text", "line"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_with_one_line_that_says_where(text: str, line: str) -> None:
    """A job that cannot be run is refused in one line with file, section, key and what to do."""
    with pytest.raises(ConfigError) as refused:
        parse_job(text, "job.toml")
    assert line in str(refused.value)
    assert str(refused.value).startswith("job.toml")
    assert "\n" not in str(refused.value)


def test_an_adapter_needs_a_models_folder(tmp_path: Path) -> None:
    """Beside random weights an adapter learns nothing of use: a job file without `from` is refused, where to say it."""
    (tmp_path / "job.toml").write_text(NAMED + "[adapter]\nrank = 8")
    spec = read_job_file(tmp_path / "job.toml")[0]
    with pytest.raises(ConfigError, match=r"name a model's folder with \[model\] from, or --model") as refused:
        resolve_job(spec, job_file=tmp_path / "job.toml", devices=(), cache_dir=tmp_path)
    assert refused.value.where.endswith("job.toml:adapter.rank")


def test_defaults_of_a_named_job() -> None:
    """A file that gives only a name is the job of all defaults."""
    assert parse_job(NAMED) == JobSpec(job=JobSection(name="tiny"))


def test_reference_file_equals_the_defaults() -> None:
    """docs/jobs/reference.toml, which lists every key, describes the job of all defaults."""
    assert read_job_file(DOCS / "reference.toml")[0] == JobSpec(job=JobSection(name="reference"))


def test_reference_file_has_every_key() -> None:
    """No key of the schema is left out of docs/jobs/reference.toml; each optimizer group gives all that it uses."""
    raw = tomllib.loads((DOCS / "reference.toml").read_text())
    kinds = get_type_hints(JobSpec)
    for section, kind in ((item.name, kinds[item.name]) for item in dataclasses.fields(JobSpec) if not item.metadata):
        fields = {item.name for item in dataclasses.fields(kind) if not item.metadata}
        assert set(raw[section]) == fields, section
    assert set(raw["adapter"]) == {item.name for item in dataclasses.fields(AdapterSpec)}
    everything = {item.name for item in dataclasses.fields(GroupSpec) if not item.metadata} - {"settings"}
    shown = [raw["optim"]["matrices"], raw["optim"]["rest"], *OTHER_GROUPS]
    assert set[str]().union(*shown) == everything


def test_reference_file_shows_each_optimizer() -> None:
    """Each name once, with exactly its own keys and their defaults, in a line that can be copied into a job."""
    assert [group["name"] for group in OTHER_GROUPS] == [name for name in OPTIMIZERS if name not in ("muon", "adamw")]
    for group in OTHER_GROUPS:
        assert set(group) == {"name", *OPTIMIZERS[group["name"]].settings}
        keys = ", ".join(f"{key} = {json.dumps(value)}" for key, value in group.items())
        job = parse_job(f"{NAMED}[optim]\nmatrices = {{ {keys} }}")
        assert job.optim.matrices == GroupSpec(name=group["name"])


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.toml")), ids=lambda path: path.name)
def test_every_job_of_the_docs_can_be_run(path: Path) -> None:
    """The job files that people copy from are valid."""
    read_job_file(path)


def test_every_fault_setting_is_accepted() -> None:
    """A checkpoint may come more often than a snapshot, and either may be off."""
    told = "snapshot_every = 0\ncopies = 16\ncheckpoint_every = 3\nlink_timeout_s = 5\nnon_finite = 'continue'"
    fault = parse_job(NAMED + "[fault]\n" + told).fault
    assert (fault.snapshot_every, fault.copies, fault.checkpoint_every) == (0, 16, 3)
    assert (fault.link_timeout_s, fault.non_finite) == (5.0, "continue")


def test_an_integer_may_stand_for_a_number() -> None:
    """`clip_norm = 1` means 1.0; nothing else is converted."""
    assert parse_job(NAMED + "[train]\nclip_norm = 1").train.clip_norm == 1.0


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    """A path without a file, a folder and a binary file each give one line with the path."""
    (tmp_path / "binary.toml").write_bytes(b"[job]\nname = '\xff'")
    for path, line in (
        (tmp_path / "none.toml", "no such job file"),
        (tmp_path, "cannot read this job file"),
        (tmp_path / "binary.toml", "line 2 is not UTF-8"),
    ):
        with pytest.raises(ConfigError, match=line) as refused:
            read_job_file(path)
        assert refused.value.where == str(path)


def test_a_byte_order_mark_is_no_part_of_a_job(tmp_path: Path) -> None:
    """Some editors begin a file with one."""
    (tmp_path / "job.toml").write_text(NAMED, encoding="utf-8-sig")
    assert read_job_file(tmp_path / "job.toml")[0].job == parse_job(NAMED).job


@pytest.mark.parametrize("link", ["grpc", "collective", "auto"])
def test_the_command_line_may_choose_other_links(link: Literal["grpc", "collective", "auto"]) -> None:
    """--link replaces what the file says, and nothing else; without it the file counts."""
    spec = parse_job(NAMED + '[train]\nlink = "collective"')
    assert spec.with_link(None) == spec
    chosen = spec.with_link(link)
    assert chosen.train.link == link
    assert chosen.with_link("collective") == spec
