"""Job files for the two oracles: every optimizer, schedule, rate, dtype and codec is in some of them."""

from random import Random

HEAD = """
[job]
name = "two-oracles"
seed = {seed}

[model]
num_hidden_layers = {layers}
hidden_size = {hidden}
intermediate_size = {inner}
num_attention_heads = {heads}
num_key_value_heads = {kv_heads}
vocab_size = 64
initializer_range = 0.1
rms_norm_eps = {eps}
rope_theta = {theta}
{model}

[data]
source = "data"

[train]
microbatch_size = 2
"""
SIZES = {"seed": 9, "layers": 2, "hidden": 32, "inner": 48, "heads": 4, "kv_heads": 2, "eps": 1e-5, "theta": 1e4}
MUON = '{ name = "muon", lr = 1e-2 }'
COARSE_MUON = (
    '{ name = "muon", lr = 1e-2, newton_schulz_dtype = "bfloat16", newton_schulz_steps = 3, nesterov = false }'
)
PUBLISHED_MUON = (
    '{ name = "muon", lr = 2e-3, adjust_lr = "match_rms_adamw", newton_schulz_coefficients = "polar_express" }'
)
PUBLISHED_NORMUON = (
    '{ name = "normuon", lr = 2e-3, adjust_lr = "match_rms_adamw", newton_schulz_coefficients = "polar_express",'
    ' newton_schulz_dtype = "bfloat16", newton_schulz_steps = 9 }'
)
EXPRESS_LIONMUON = '{ name = "lionmuon", newton_schulz_coefficients = "polar_express", newton_schulz_steps = 3 }'
ADAMW = '{ name = "adamw", lr = 3e-3, betas = [0.8, 0.99], eps = 1e-6, weight_decay = 0.3 }'
LION = '{ name = "lion", lr = 1e-3, betas = [0.9, 0.99] }'
NARROW_MUON = '{ name = "muon", lr = 1e-2, momentum_dtype = "bfloat16" }'
NARROW_ADAMW = '{ name = "adamw", lr = 3e-3, momentum_dtype = "bfloat16" }'
NARROW_LION = '{ name = "lion", lr = 1e-3, momentum_dtype = "bfloat16" }'
NARROW_SGD = '{ name = "sgd", lr = 0.1, momentum = 0.8, momentum_dtype = "bfloat16" }'
NORMUON = '{ name = "normuon", lr = 1e-2, beta2 = 0.9, newton_schulz_dtype = "bfloat16", momentum_dtype = "bfloat16" }'
LIONMUON = '{ name = "lionmuon", lr = 1e-2, betas = [0.9, 0.99], sign_share = 0.1 }'
SOAP = '{ name = "soap", lr = 3e-3, precondition_frequency = 2, weight_decay = 0.3 }'
LONG_SOAP = '{ name = "soap", lr = 3e-3, precondition_frequency = 3, max_precondition_dim = 40 }'
ADAN = '{ name = "adan", lr = 3e-3, betas = [0.95, 0.9], beta3 = 0.98, momentum_dtype = "bfloat16" }'
MARS = '{ name = "mars", lr = 3e-3, betas = [0.9, 0.98], gamma = 0.05 }'
SGD = '{ name = "sgd", lr = 0.1, momentum = 0.8 }'
PLAIN_SGD = '{ name = "sgd", lr = 0.1, momentum = 0.0, nesterov = false, weight_decay = 0.0 }'
HEAVY_BALL = '{ name = "sgd", lr = 0.1, momentum = 0.9, nesterov = false, weight_decay = 0.01 }'


def job_file(train: str = "", optim: str = "", *, model: str = "", batches: int = 5, **sizes: float) -> str:
    """A job of a moment. `train`, `optim` and `model` are lines of their sections; `sizes` replaces some of SIZES."""
    head = HEAD.format(**{**SIZES, **sizes}, model=model)
    defaults = {"microbatches": 4, "sequence_length": 12, "batches": batches}
    given = {line.split(" = ")[0] for line in [*train.splitlines(), *optim.splitlines()]}
    lines = [f"{key} = {value}" for key, value in defaults.items() if key not in given]
    warmup = [] if "warmup_batches" in given else ["warmup_batches = 2"]
    return "\n".join([head, *lines, train, "[optim]", *warmup, optim, ""])


LLAMA3 = (
    'rope_scaling = { rope_type = "llama3", factor = 8.0, low_freq_factor = 1.0, high_freq_factor = 4.0, '
    "original_max_position_embeddings = 8 }"
)
YARN = (
    'rope_scaling = { rope_type = "yarn", factor = 4.0, original_max_position_embeddings = 64, beta_fast = 4.0, '
    "beta_slow = 1.0, attention_factor = 1.1, truncate = false }"
)

MIXTRAL = "num_experts = 4\nnum_experts_per_tok = 2\nmoe_intermediate_size = 48\nnorm_topk_prob = true"
QWEN3_MOE = "qk_norm = true\nnum_experts = 5\nnum_experts_per_tok = 2\nmoe_intermediate_size = 20"
DOTS = (
    QWEN3_MOE + '\nrouter_scoring = "sigmoid"\nrouter_bias = true\nnum_shared_experts = 2\nnorm_topk_prob = true'
    "\nrouted_scaling_factor = 1.5"
)

OLMO = 'norm_placement = "after"\nqk_norm = true\nqk_norm_over = "heads"'
MINISTRAL = YARN.replace("= 64", "= 4").replace("false", "true, llama_4_scaling_beta = 0.3")
GLM = """norm_placement = "both"
fused_gate_up = true
partial_rotary_factor = 0.5
rope_interleaved = true
qkv_bias = true"""
GRANITE = """tie_word_embeddings = true
embedding_multiplier = 12.3
attention_multiplier = 0.1
residual_multiplier = 0.22
logits_scaling = 6.0"""

QWEN35 = """qk_norm = true
zero_centered_norms = true
attn_output_gate = true
partial_rotary_factor = 0.5
head_dim = 16
linear_num_key_heads = 2
linear_num_value_heads = 4
linear_key_head_dim = 8
linear_value_head_dim = 12
linear_conv_kernel_dim = 4
layer_types = ["linear_attention", "full_attention"]"""
QWEN2_MOE = (
    "qkv_bias = true\nnum_experts = 4\nnum_experts_per_tok = 2\nmoe_intermediate_size = 20\nnum_shared_experts = 2"
    "\nshared_expert_gate = true"
)
PHI = """fused_projections = true
partial_rotary_factor = 0.75
rope_scaling = { rope_type = "longrope", original_max_position_embeddings = 8, attention_factor = 1.2, \
short_factor = [1.0, 1.5, 2.0], long_factor = [1.0, 3.0, 9.0] }"""

GEMMA = """tie_word_embeddings = true
norm_placement = "both"
zero_centered_norms = true
hidden_act = "gelu_pytorch_tanh"
embedding_multiplier = 5.656854249492381
attention_multiplier = 0.25
sliding_window = 4
layer_types = ["sliding_attention", "full_attention"]"""
GEMMA2 = GEMMA + "\nattn_logit_softcapping = 0.5\nfinal_logit_softcapping = 3.0"
GEMMA3 = GEMMA + "\nqk_norm = true\nwindow_rope_theta = 100.0"
GEMMA4 = (
    GEMMA.replace("zero_centered_norms = true\n", "").replace("multiplier = 0.25", "multiplier = 1.0")
    + """
qk_norm = true
value_norm = true
layer_scalar = true
global_head_dim = 12
num_global_key_value_heads = 1
attention_k_eq_v = true
window_rope_theta = 100.0
rope_scaling = { rope_type = "proportional", factor = 2.0, partial_rotary_factor = 0.5 }"""
)

GPT_OSS = (
    """head_dim = 10
qkv_bias = true
output_bias = true
attention_sinks = true
sliding_window = 4
layer_types = ["sliding_attention", "full_attention"]
num_experts = 4
num_experts_per_tok = 2
moe_intermediate_size = 20
norm_topk_prob = true
expert_bias = true
swiglu_limit = 0.1
swiglu_alpha = 1.702
"""
    + YARN
)

JOBS = {
    "defaults": job_file(),
    "recompute": job_file('recompute = "block"'),
    "recompute elementwise": job_file('recompute = "elementwise"'),
    "adapters": "[adapter]\nrank = 3\nalpha = 7.0\n" + job_file(),
    "adapters of two matrices, AdamW, bfloat16, chunks": "[adapter]\nrank = 2\nrslora = true\n"
    'targets = ["q_proj", "down_proj"]\n'
    + job_file('schedule = "1f1b"\ndtype = "bfloat16"\nloss_chunk = 5', f"matrices = {ADAMW}"),
    "Mixtral": job_file(
        "reduction_groups = 2\nrouter_balance_loss = 0.02\nrouter_z_loss = 0.001\nclip_norm = 0.3", model=MIXTRAL
    ),
    "Qwen3-MoE, bfloat16, chunks": job_file(
        'schedule = "1f1b"\ndtype = "bfloat16"\nloss_chunk = 5\nrouter_balance_loss = 0.02',
        f"matrices = {ADAMW}",
        model=QWEN3_MOE,
    ),
    "dots.llm1": job_file(
        "router_balance_loss = 0.02\nrouter_z_loss = 0.001",
        'undecayed = ["biases", "embeddings"]\nrouter_bias_lr = 0.05',
        model=DOTS,
    ),
    "Qwen3.5": job_file("sequence_length = 70\nmicrobatches = 2", model=QWEN35, layers=3),
    "Qwen3.5, separate documents, bfloat16": job_file(
        'loss_mask = "data"\ndocuments = "separate"\ndtype = "bfloat16"\nsequence_length = 70\nmicrobatches = 2',
        f'rest = {ADAMW}\nundecayed = ["norms", "biases"]',
        model=QWEN35,
    ),
    "Qwen3.5-MoE": job_file(
        'loss_mask = "data"\ndocuments = "separate"\nrouter_balance_loss = 0.02',
        model=QWEN35 + "\nnum_experts = 4\nnum_experts_per_tok = 2\nmoe_intermediate_size = 20\nnorm_topk_prob = true"
        "\nnum_shared_experts = 1\nshared_expert_gate = true",
    ),
    "Qwen3.5 under adapters, computed again": "[adapter]\nrank = 2\n"
    + job_file('loss_mask = "data"\ndocuments = "separate"\nrecompute = "attention"', model=QWEN35),
    "adapters beside experts": "[adapter]\nrank = 2\n" + job_file(model=QWEN3_MOE),
    "preferences": "[adapter]\nrank = 3\n"
    + job_file('objective = "dpo"\nloss_mask = "data"\ndocuments = "separate"\neval_every = 2'),
    "preferences, AdamW, bfloat16, chunks, int8": "[adapter]\nrank = 2\n"
    + job_file(
        'objective = "dpo"\ndpo_beta = 0.7\nloss_mask = "data"\ndocuments = "separate"\nschedule = "1f1b"\n'
        'dtype = "bfloat16"\nloss_chunk = 5\nreduction_groups = 2\nwire = "int8"',
        f"matrices = {ADAMW}",
    ),
    "dropout": "[adapter]\nrank = 2\ndropout = 0.3\n" + job_file('recompute = "attention"\neval_every = 2'),
    "dropout of preferences, bfloat16": '[adapter]\nrank = 2\ndropout = 0.1\ntargets = ["q_proj", "down_proj"]\n'
    + job_file('objective = "dpo"\nloss_mask = "data"\ndocuments = "separate"\ndtype = "bfloat16"'),
    "adapters on experts": '[adapter]\nrank = 2\ntargets = ["q_proj", "gate_proj", "up_proj", "down_proj"]\n'
    + job_file("router_balance_loss = 0.02", model=QWEN3_MOE),
    "adapters beside NF4": '[adapter]\nrank = 2\nquantize = "nf4"\n' + job_file(),
    "adapters with dropout and rsLoRA beside NF4": "[adapter]\nrank = 3\nalpha = 5.0\nrslora = true\ndropout = 0.2\n"
    'quantize = "nf4"\n' + job_file('recompute = "block"', model="qkv_bias = true"),
    "adapters with dropout and rsLoRA beside int8, bfloat16": "[adapter]\nrank = 3\nrslora = true\ndropout = 0.05\n"
    'quantize = "int8"\ntargets = ["v_proj", "o_proj", "up_proj", "down_proj"]\n'
    + job_file('dtype = "bfloat16"\nrecompute = "attention"', f"matrices = {ADAMW}"),
    "adapters beside int8 experts, bfloat16": '[adapter]\nrank = 2\nquantize = "int8"\n'
    + job_file('dtype = "bfloat16"', model=QWEN3_MOE),
    "tied": job_file("reduction_groups = 3\nclip_norm = 0.3", model="tie_word_embeddings = true"),
    "tied, bfloat16, chunks": job_file(
        'schedule = "1f1b"\ndtype = "bfloat16"\nloss_chunk = 5\nreduction_groups = 2',
        f"matrices = {ADAMW}",
        model="tie_word_embeddings = true",
    ),
    "tied under adapters": "[adapter]\nrank = 2\n" + job_file(model="tie_word_embeddings = true"),
    "no error feedback": job_file(optim="error_feedback = 0.0"),
    "half the error feedback, constant rate": job_file(optim='error_feedback = 0.5\nlr_schedule = "constant"'),
    "1f1b, AdamW": job_file('schedule = "1f1b"', f"matrices = {ADAMW}\nrest = {ADAMW}"),
    "gpipe, AdamW": job_file('schedule = "gpipe"', f"matrices = {ADAMW}\nrest = {ADAMW}"),
    "three groups, Lion, wsd": job_file(
        "reduction_groups = 3\nmicrobatches = 7",
        f'matrices = {LION}\nrest = {LION}\nlr_schedule = "wsd"\nwarmup_batches = 1',
        batches=7,
    ),
    "SGD without clipping": job_file("clip_norm = 0.0", f"matrices = {SGD}\nrest = {HEAVY_BALL}"),
    "plain SGD, hard clipping": job_file(
        'schedule = "1f1b"\nclip_norm = 0.05', f"matrices = {PLAIN_SGD}\nrest = {PLAIN_SGD}"
    ),
    "NorMuon and Adan": job_file(optim=f"matrices = {NORMUON}\nrest = {ADAN}", batches=7),
    "NorMuon and MARS, bfloat16": job_file(
        'dtype = "bfloat16"', 'matrices = { name = "normuon", nesterov = false }\nrest = ' + MARS, batches=6
    ),
    "LionMuon": job_file("reduction_groups = 2", f"matrices = {LIONMUON}", batches=7),
    "muon_as_published": job_file("reduction_groups = 2", f"matrices = {PUBLISHED_MUON}"),
    "NorMuon with further steps, bfloat16": job_file('dtype = "bfloat16"', f"matrices = {PUBLISHED_NORMUON}"),
    "LionMuon by Polar Express": job_file(optim=f"matrices = {EXPRESS_LIONMUON}"),
    "SOAP and MARS": job_file(optim=f"matrices = {SOAP}\nrest = {MARS}", batches=7),
    "SOAP of short sides, 1f1b, bfloat16": job_file(
        'schedule = "1f1b"\ndtype = "bfloat16"', f"matrices = {LONG_SOAP}\nrest = {ADAN}", batches=8
    ),
    "Adan and MARS": job_file("clip_norm = 0.0", f"matrices = {ADAN}\nrest = {MARS}", batches=7),
    "separate documents, bfloat16": job_file('loss_mask = "data"\ndocuments = "separate"\ndtype = "bfloat16"'),
    "separate documents, yarn, math": job_file(
        'loss_mask = "data"\ndocuments = "separate"\nattention_backend = "math"', model=YARN
    ),
    "separate documents within windows": job_file(
        'loss_mask = "data"\ndocuments = "separate"\nrecompute = "attention"', model="sliding_window = 3"
    ),
    "masked, two groups": job_file('loss_mask = "data"\nreduction_groups = 2'),
    "masked, bfloat16, chunks of 7": job_file('loss_mask = "data"\ndtype = "bfloat16"\nloss_chunk = 7'),
    "bfloat16": job_file('dtype = "bfloat16"'),
    "two_batches_without_delay": job_file("sync_batches = 2", batches=6),
    "a batch without delay, evaluated, bfloat16": job_file(
        'sync_batches = 1\neval_every = 1\ndtype = "bfloat16"\nreduction_groups = 2',
        'error_feedback_dtype = "bfloat16"',
        batches=5,
    ),
    "ends early, at first without delay": job_file(
        "sync_batches = 5\neval_every = 1\neval_patience = 2\neval_min_delta = 0.02", batches=12
    ),
    "bfloat16, two groups, Muon in bfloat16": job_file(
        'dtype = "bfloat16"\nreduction_groups = 2\nschedule = "gpipe"', f"matrices = {COARSE_MUON}\nrest = {LION}"
    ),
    "one key head for all, no warm-up": job_file(
        'attention_backend = "math"', f"matrices = {MUON}\nrest = {SGD}\nwarmup_batches = 0", kv_heads=1, theta=500.0
    ),
    "own key heads, warm-up to the end": job_file(
        'attention_backend = "flash"', f"matrices = {MUON}\nwarmup_batches = 9", kv_heads=4, eps=1e-2
    ),
    "int8": job_file('wire = "int8"\nreduction_groups = 2'),
    "int8 without feedback, bfloat16": job_file('wire = "int8"\nwire_feedback = false\ndtype = "bfloat16"'),
    "momentum in bfloat16": job_file(optim=f"matrices = {NARROW_MUON}\nrest = {NARROW_ADAMW}"),
    "error feedback in bfloat16": job_file(optim='error_feedback_dtype = "bfloat16"'),
    "everything in bfloat16": job_file(
        'dtype = "bfloat16"', f'matrices = {NARROW_LION}\nrest = {NARROW_SGD}\nerror_feedback_dtype = "bfloat16"'
    ),
    "loss in chunks": job_file("loss_chunk = 7"),
    "epochs": job_file('data_order = "epochs"', batches=9),
    "epochs, masked": job_file('data_order = "epochs"\nloss_mask = "data"', batches=9),
    "evaluated": job_file("eval_every = 2\neval_microbatches = 2", batches=5),
    "evaluated, masked, bfloat16": job_file('eval_every = 3\nloss_mask = "data"\ndtype = "bfloat16"\nloss_chunk = 5'),
    "evaluated, int8": job_file('eval_every = 1\nwire = "int8"\nschedule = "1f1b"'),
    "ends early": job_file("eval_every = 1\neval_patience = 2\neval_min_delta = 0.02", batches=12),
    "ends early, 1f1b, bfloat16": job_file(
        'schedule = "1f1b"\neval_every = 2\neval_patience = 1\neval_min_delta = 0.05\ndtype = "bfloat16"', batches=12
    ),
    "may end early": job_file("eval_every = 3\neval_patience = 9", batches=8),
    "one product of a loss in chunks": job_file('loss_chunk = 7\nloss_gradient = "whole"'),
    "one_product_of_a_loss_in_chunks_bfloat16": job_file(
        'loss_chunk = 5\ndtype = "bfloat16"\nloss_mask = "data"\nloss_gradient = "whole"', "error_feedback = 0.0"
    ),
    "loss_in_chunks_bfloat16": job_file('loss_chunk = 5\ndtype = "bfloat16"', "error_feedback = 0.0"),
    "bf16 on the wire": job_file('wire = "bf16"', f"matrices = {ADAMW}"),
    "rate with a floor": job_file(optim="lr_floor = 0.2", batches=8),
    "a floor after the end": job_file(
        optim='lr_floor = 0.1\nschedule_batches = 3\nwarmup_batches = 1\nafter_end = "floor"', batches=6
    ),
    "another warm-up after the end": job_file(
        optim='lr_schedule = "wsd"\nschedule_batches = 3\nwarmup_batches = 1\nafter_end = "warm_up_again"', batches=7
    ),
    "wsd with a floor": job_file(optim='lr_schedule = "wsd"\nlr_floor = 0.1', batches=7),
    "no decay of norms and biases": job_file(
        optim=f'rest = {ADAMW}\nundecayed = ["norms", "biases"]', model="qkv_bias = true\nqk_norm = false"
    ),
    "no decay of embeddings": job_file(optim=f'rest = {ADAMW}\nundecayed = ["embeddings"]'),
    "positions of Llama 3.1": job_file(model=LLAMA3),
    "positions, linear": job_file(model='rope_scaling = { rope_type = "linear", factor = 2.5 }'),
    "positions, dynamic": job_file(
        model='rope_scaling = { rope_type = "dynamic", factor = 3.0, original_max_position_embeddings = 5 }'
    ),
    "positions of yarn": job_file(model=YARN),
    "positions of yarn, whole pairs": job_file(model=YARN.replace("false", "true")),
    "biases": job_file(model="qkv_bias = true\noutput_bias = true\nmlp_bias = true"),
    "biases of Qwen2, late windows": job_file(model="qkv_bias = true\nsliding_window = 4\nfirst_window_layer = 1"),
    "Qwen3, bfloat16": job_file('dtype = "bfloat16"', model="qk_norm = true\nhead_dim = 12"),
    "windows on every other block": job_file(
        model='qkv_bias = true\nsliding_window = 3\nlayer_types = ["sliding_attention", "full_attention"]', layers=3
    ),
    "windows": job_file('recompute = "block"', model="sliding_window = 3"),
    "fused projections": job_file(model="fused_projections = true"),
    "Olmo 2, bfloat16": job_file('dtype = "bfloat16"\nrecompute = "attention"', model=OLMO),
    "olmo3_separate_documents": job_file(
        'loss_mask = "data"\ndocuments = "separate"',
        layers=3,
        model=f"{OLMO}\n{YARN}\nsliding_window = 3\nwindow_rope_theta = 500.0\n"
        'layer_types = ["sliding_attention", "full_attention"]',
    ),
    "Ministral 3": job_file(model=MINISTRAL),
    "ministral3_separate_documents": job_file(
        'loss_mask = "data"\ndocuments = "separate"\ndtype = "bfloat16"', model=MINISTRAL
    ),
    "GLM-4": job_file(model=GLM, optim=f"matrices = {ADAMW}"),
    "adapters beside GLM-4": "[adapter]\nrank = 2\n" + job_file('dtype = "bfloat16"', model=GLM),
    "GLM-4 9B": job_file('recompute = "block"', model=GLM.replace("both", "before")),
    "Seed-OSS": job_file(model="qkv_bias = true\noutput_bias = false\nmlp_bias = true"),
    "Phi-4-mini": job_file(model=PHI),
    "Phi-4-mini, short": job_file(model=PHI.replace("_embeddings = 8", "_embeddings = 80")),
    "Qwen2-MoE": job_file("router_balance_loss = 0.02", model=QWEN2_MOE),
    "adapters beside a gated expert": "[adapter]\nrank = 2\n" + job_file('dtype = "bfloat16"', model=QWEN2_MOE),
    "Gemma 2": job_file(model=GEMMA2, layers=3),
    "gemma2_separate_documents": job_file(
        'loss_mask = "data"\ndocuments = "separate"\ndtype = "bfloat16"\nloss_chunk = 5\nrecompute = "attention"',
        f"rest = {ADAMW}",
        model=GEMMA2,
    ),
    "Gemma 3": job_file('dtype = "bfloat16"', model=GEMMA3, layers=3),
    "adapters beside Gemma 3": "[adapter]\nrank = 2\n" + job_file(model=GEMMA3),
    "gemma4_bfloat16": job_file('dtype = "bfloat16"', f"rest = {ADAMW}", model=GEMMA4),
    "gemma4_separate_documents": job_file('loss_mask = "data"\ndocuments = "separate"', model=GEMMA4),
    "adapters beside Gemma 4": "[adapter]\nrank = 2\n" + job_file(model=GEMMA4),
    "gpt-oss": job_file("router_balance_loss = 0.02", model=GPT_OSS, inner=20, layers=3),
    "gpt_oss_separate_documents": job_file(
        'loss_mask = "data"\ndocuments = "separate"\ndtype = "bfloat16"\nrecompute = "attention"',
        f'rest = {ADAMW}\nundecayed = ["biases"]',
        model=GPT_OSS,
        inner=20,
    ),
    "gpt_oss_math": job_file('attention_backend = "math"', model=GPT_OSS, inner=20),
    "adapters beside gpt-oss in int8": '[adapter]\nrank = 2\nquantize = "int8"\n' + job_file(model=GPT_OSS, inner=20),
    "Granite": job_file('recompute = "attention"', model=GRANITE),
    "granite_bfloat16_in_chunks": job_file('dtype = "bfloat16"\nloss_chunk = 5', model=GRANITE),
    "smollm3_separate_documents": job_file(
        'loss_mask = "data"\ndocuments = "separate"', model="no_rope_layer_interval = 2"
    ),
}
CUT = (
    "Gemma 2",
    "gemma2_separate_documents",
    "Gemma 3",
    "gemma4_separate_documents",
    "Phi-4-mini",
    "Qwen2-MoE",
    "olmo3_separate_documents",
    "ministral3_separate_documents",
    "adapters beside GLM-4",
    "Granite",
    "granite_bfloat16_in_chunks",
    "gpt-oss",
    "gpt_oss_separate_documents",
    "gpt_oss_math",
    "adapters beside gpt-oss in int8",
    "smollm3_separate_documents",
)
"""Jobs that a pipeline computes too, in a stage for each layer."""
SAME_BITS = {"recompute": "defaults", "recompute elementwise": "defaults", "gpipe, AdamW": "1f1b, AdamW"}
"""A job that has the bits of another one. No others have."""
CODED_CUTS = ("block.1", "head")
"""Where a job's codec rounds, if it has one."""


def drawn_job(number: int) -> str:
    """A job whose fields are drawn, each by itself."""
    draw = Random(number)
    heads = draw.choice([1, 2, 4])
    window, width = draw.choice([0, 0, 1, 6]), draw.choice([0, 0, 10])
    model = "\n".join(
        [
            draw.choice(["", LLAMA3, YARN]),
            f"head_dim = {width}",
            f"sliding_window = {window}",
            draw.choice(["", "qkv_bias = true", "qk_norm = true"] + ["fused_projections = true"] * (not width)),
        ]
    )
    m = draw.randint(1, 6)
    schedule = draw.choice(["2bw", "2bw", "1f1b", "gpipe"])
    group = [MUON, COARSE_MUON, NARROW_MUON, ADAMW, NARROW_ADAMW, LION, NARROW_LION, SGD, PLAIN_SGD, HEAVY_BALL]
    group += [NORMUON, LIONMUON, PUBLISHED_MUON, PUBLISHED_NORMUON, EXPRESS_LIONMUON, SOAP, LONG_SOAP, ADAN, MARS]
    train = f"""
schedule = "{schedule}"
sync_batches = {draw.choice([0, 0, 1, 3]) if schedule == "2bw" else 0}
dtype = "{draw.choice(["float32", "float32", "bfloat16"])}"
microbatches = {m}
sequence_length = {draw.choice([1, 5, 16, 65])}
reduction_groups = {draw.randint(1, m)}
clip_norm = {draw.choice([0.0, 0.1, 1.0, 100.0])}
wire = "{draw.choice(["none", "none", "bf16", "int8"])}"
wire_feedback = {draw.choice(["true", "false"])}
recompute = "{draw.choice(["none", "block"])}"
loss_chunk = {draw.choice([0, 0, 1, 8, 200])}
attention_backend = "{draw.choice(["auto", "math", "flash"])}"
"""
    optim = f"""
matrices = {draw.choice(group)}
rest = {draw.choice(group[3:])}
error_feedback_dtype = "{draw.choice(["float32", "bfloat16"])}"
error_feedback = {draw.choice([0.0, 0.3, 1.0, 1.5])}
lr_schedule = "{draw.choice(["constant", "cosine", "wsd"])}"
warmup_batches = {draw.randint(0, 12)}
lr_floor = {draw.choice([0.0, 0.0, 0.3])}
undecayed = {draw.choice(["[]", '["norms"]', '["norms", "biases", "embeddings"]'])}
"""
    return job_file(
        train,
        optim,
        model=model,
        batches=draw.randint(1, 12),
        seed=draw.choice([0, 9, 123456789]),
        layers=draw.randint(1, 3),
        hidden=draw.choice([16, 32, 96]),
        inner=draw.choice([24, 100]),
        heads=heads,
        kv_heads=draw.choice([count for count in (1, 2, 4) if count <= heads]),
    )
