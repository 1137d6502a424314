"""`compile = true`: layers as code that torch's compiler makes for their shapes, instead of one kernel per operation.

Compiled code rounds differently, because fused operations skip roundings in between. A layer's code depends on its
kind, its shapes and the job, never on its neighbours. So no cut changes a bit, and the plain loop compiles the same
layers. All blocks share one code, and code is kept on disk: another process of the node needs seconds, not the
compiler. A block is two codes, attention and the rest: what is computed again is the first or both, never another code.
"""

import importlib.util
import os
import shutil
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from headway.stages.errors import CompilationError
from headway.stages.model import decoder as formulas
from headway.stages.model.objective import microbatch_loss
from headway.stages.model.positions import document_rows
from headway.stages.spec import ModelSpec, TrainSpec, layer_names

CXX: Final = "g++"
"""C++ compiler that torch calls on a CPU, unless the environment's CXX names another."""

_Key = tuple[ModelSpec, TrainSpec, torch.device]
# the compiler's own caches exist once per process too
_compiled_for: _Key | None = None
_compiled_kinds: set[str] = set()


def compile_layer(layer: nn.Module) -> nn.Module:
    """Compile the layer's forward and backward at their first call with tensors. Returns the layer."""
    # Rotary positions and windows are computed as usual; the code has them as constants.
    torch.compiler.assume_constant_result(formulas.kept_rotary_table)  # type: ignore[no-untyped-call]
    torch.compiler.assume_constant_result(formulas.kept_query_scales)  # type: ignore[no-untyped-call]
    torch.compiler.assume_constant_result(formulas.kept_window_mask)  # type: ignore[no-untyped-call]
    if isinstance(layer, formulas.Block):
        layer.compile_parts(_compiled)
        return layer
    if isinstance(layer, formulas.Head):
        layer.sum_of_losses = _compiled(layer.sum_of_losses)  # type: ignore[method-assign]
    layer.compile(**_WHOLE)
    return layer


_WHOLE: Final[dict[str, Any]] = {"fullgraph": True, "dynamic": False}


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, **_WHOLE)


def compile_ahead(names: Iterable[str], model: ModelSpec, train: TrainSpec, device: torch.device) -> None:
    """Compile every kind of layer now, both ways, unless this process has done so for this job.

    The kinds of the named layers must compile. The others are for later plans, which are prepared while this process
    computes: then it cannot stop for the compiler. If one of these fails, it is tried again when it is named. Takes
    seconds to minutes, and the memory of one layer at a time. Raises CompilationError, in one line.
    """
    global _compiled_for
    _check_compiler(device)
    train = replace(train, recompute="none")  # every choice has the same code
    if _compiled_for != (model, train, device):
        # Code of other shapes counts against the compiler's limit per function.
        torch.compiler.reset()
        _compiled_kinds.clear()
        _compiled_for = (model, train, device)
    _set_up()
    named = {model.kind_of(name) for name in names}
    by_kind = {model.kind_of(name): name for name in layer_names(model)}
    for kind in sorted(by_kind.keys() - _compiled_kinds, key=lambda kind: (kind not in named, kind)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the compiler warns about its own modules
                _run_once(by_kind[kind], model, train, device)
        except RuntimeError as error:
            if kind in named:
                first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
                raise CompilationError(f"{kind} cannot be compiled here: {first}") from error
        else:
            _compiled_kinds.add(kind)


def _set_up() -> None:
    import torch._functorch.config as graphs
    import torch._inductor.config as inductor

    # Keep nothing for a backward that it can make again without a product or a sum.
    graphs.ban_recompute_materialized_backward = False
    graphs.ban_recompute_used_far_apart = False
    graphs.ban_recompute_long_fusible_chains = False
    inductor.compile_threads = 1  # start no processes
    inductor.deterministic = True  # choose no code by its seconds
    # Else each call moves its code to the front of the list, and a thread that looks through the list misses it.
    torch._C._dynamo.eval_frame._set_lru_cache(False)  # type: ignore[attr-defined]


def _check_compiler(device: torch.device) -> None:
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            raise CompilationError("a CUDA device needs the package triton, which is not installed")
        return
    compiler = os.environ.get("CXX", CXX)
    if shutil.which(compiler) is None:
        raise CompilationError(f"a CPU needs a C++ compiler, and there is no {compiler}; install one or set CXX")


def _run_once(name: str, model: ModelSpec, train: TrainSpec, device: torch.device) -> None:
    """Run a forward and a backward of one layer on zeros, with real shapes, dtypes and needs; and a forward as an
    evaluation does it, if there are any.
    """
    dtype: torch.dtype = getattr(torch, train.dtype)
    layer = formulas.build_layer(name, model, attention_backend=train.attention_backend)
    weights = {key: torch.zeros(tensor.shape, dtype=dtype, device=device) for key, tensor in layer.named_parameters()}
    layer.load_state_dict(weights, assign=True)
    compile_layer(layer)
    shape = (train.microbatch_size, train.sequence_length)
    inputs: Tensor
    if name == "embed":
        inputs = torch.zeros(shape, dtype=torch.int64, device=device)
    else:
        inputs = torch.zeros((*shape, model.hidden_size), dtype=dtype, device=device, requires_grad=True)
    documents = None
    if train.separates_documents:
        documents = document_rows(torch.zeros(shape, dtype=torch.int32, device=device), model, dtype)
    beside = () if documents is None or not name.startswith("block.") else (documents,)

    def compute(inputs: Tensor) -> Tensor:
        if name == "head" and train.loss_chunk:
            targets = torch.zeros(shape, dtype=torch.int64, device=device)
            return microbatch_loss(layer, inputs, targets, chunk=train.loss_chunk)
        output: Tensor = layer(inputs, *beside)
        return output

    with torch.enable_grad():
        output = compute(inputs)
        by = [tensor for tensor in (*layer.parameters(), inputs) if tensor.requires_grad]
        if by:
            torch.autograd.grad(output, by, torch.ones_like(output))  # the gradient of a loss is 1
    if train.eval_every:
        with torch.no_grad():
            compute(inputs.detach())
