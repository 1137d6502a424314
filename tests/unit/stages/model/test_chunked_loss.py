"""The loss with a few rows' logits at a time: the same loss within rounding, and bounded memory."""

import pytest
import torch
from torch import Tensor

from headway.stages.model.decoder import Head
from headway.stages.model.objective import microbatch_loss
from headway.stages.spec import ModelSpec
from tests.rigs.middle_stage import LiveBytes
from tests.rigs.operations import Operations
from tests.rigs.update_memory import NewMemory

WIDTH, VOCABULARY, ROWS = 8, 512, 64
SPEC = ModelSpec(num_hidden_layers=1, hidden_size=WIDTH, num_attention_heads=1, vocab_size=VOCABULARY)


def make_head(dtype: torch.dtype) -> Head:
    generator = torch.Generator().manual_seed(1)
    head = Head(SPEC)
    weights = {
        "norm.weight": torch.ones(WIDTH, dtype=dtype),
        "lm_head.weight": torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype),
    }
    head.load_state_dict(weights, assign=True)
    return head


def draw(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(2, ROWS // 2, WIDTH, generator=generator).to(dtype)
    return hidden, torch.randint(VOCABULARY, (2, ROWS // 2), generator=generator)


def computed(dtype: torch.dtype, *, chunk: int, is_whole: bool = False) -> tuple[Tensor, ...]:
    """The loss, and the gradients of the hidden states, of the norm and of the vocabulary's matrix."""
    head, (hidden, targets) = make_head(dtype), draw(dtype)
    leaf = hidden.requires_grad_()
    loss = microbatch_loss(head, leaf, targets, chunk=chunk, is_whole=is_whole)
    return loss.detach(), *torch.autograd.grad(loss, [leaf, head.norm.weight, head.lm_head.weight])


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("chunk", [ROWS, ROWS + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_chunk_has_the_bits_of_all_rows_at_once(dtype: torch.dtype, chunk: int, is_whole: bool) -> None:
    """A chunk that holds the whole microbatch is the plain loss."""
    found_in_chunk = computed(dtype, chunk=chunk, is_whole=is_whole)
    for found, expected in zip(found_in_chunk, computed(dtype, chunk=0), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_change_the_rounding_alone(dtype: torch.dtype, chunk: int, is_whole: bool) -> None:
    """Any chunk, also one that does not divide the rows → the loss and the gradients within rounding of the dtype."""
    found_in_chunks = computed(dtype, chunk=chunk, is_whole=is_whole)
    for found, expected in zip(found_in_chunks, computed(dtype, chunk=0), strict=True):
        tolerance = 1e-6 if dtype == torch.float32 or not found.ndim else 1e-2
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def test_nothing_may_stand_above_the_loss() -> None:
    """A loss that is multiplied by 3 → refused, because the forward has made the gradients already."""
    head, (hidden, targets) = make_head(torch.float32), draw(torch.float32)
    loss = 3 * microbatch_loss(head, hidden, targets, chunk=16)
    with pytest.raises(RuntimeError, match="Expected Tensor with single nonzero value"):
        torch.autograd.grad(loss, [head.lm_head.weight])


@pytest.mark.parametrize(("is_frozen", "of_each_chunk"), [(False, 3), (True, 2)])
def test_no_product_is_computed_twice(is_frozen: bool, of_each_chunk: int) -> None:
    """4 chunks: logits, the gradient of the rows, and that of the matrix unless it is frozen; held-out rows, logits."""
    head, (hidden, targets) = make_head(torch.float32).requires_grad_(not is_frozen), draw(torch.float32)
    by = [hidden.requires_grad_(), *(() if is_frozen else head.parameters())]
    with Operations() as operations:
        torch.autograd.grad(microbatch_loss(head, hidden, targets, chunk=16), by)
    assert operations.num_products == 4 * of_each_chunk
    with Operations() as operations, torch.no_grad():
        microbatch_loss(head, hidden, targets, chunk=16)
    assert operations.num_products == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_bound_the_memory_of_the_logits(dtype: torch.dtype) -> None:
    """Forward and backward of 64 rows by 8 → 12 bytes for each of a chunk's logits, and the weight's gradients."""
    head, (hidden, targets) = make_head(dtype), draw(dtype)
    by = [hidden.requires_grad_(), head.lm_head.weight]
    peaks = {}
    for chunk in (0, 8):
        with NewMemory([*head.parameters(), hidden, targets]) as memory:
            torch.autograd.grad(microbatch_loss(head, hidden, targets, chunk=chunk), by)
        peaks[chunk] = memory.peak
    assert peaks[0] >= 12 * ROWS * VOCABULARY
    weights = VOCABULARY * WIDTH * (4 + dtype.itemsize)
    assert peaks[8] <= 12 * 8 * VOCABULARY + weights + 8 * hidden.nbytes


def on_a_card(chunk: int, *, is_whole: bool) -> tuple[Operations, LiveBytes]:
    """What a head of 2048 × 131,072 does and takes for 4096 tokens in bfloat16, counted on meta tensors."""
    spec = ModelSpec(num_hidden_layers=1, hidden_size=2048, num_attention_heads=16, vocab_size=1 << 17)
    head = Head(spec).to(torch.bfloat16)
    hidden = torch.empty((1, 4096, 2048), device="meta", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.empty((1, 4096), device="meta", dtype=torch.int64)
    with LiveBytes([*head.parameters(), hidden, targets]) as live, Operations() as operations:
        loss = microbatch_loss(head, hidden, targets, chunk=chunk, is_whole=is_whole)
        torch.autograd.grad(loss, [hidden, *head.parameters()])
    return operations, live


@pytest.mark.parametrize("chunk", [512, 2048])
def test_one_product_moves_no_sums(chunk: int) -> None:
    """Each chunk's part of the sum is read, added and written, 10 bytes an element of the matrix, and the sum is cast.
    One product has the gradients of all logits written to one place instead, and takes no more memory than the sum.
    """
    (by_chunk, of_sums), (once, of_logits) = on_a_card(chunk, is_whole=False), on_a_card(chunk, is_whole=True)
    num_chunks, matrix, logits = 4096 // chunk, 2048 << 17, 4096 << 17
    assert (by_chunk.num_products, once.num_products) == (3 * num_chunks, 2 * num_chunks + 1)
    sums = (6 + 10 * (num_chunks - 1) + 6) * matrix
    assert by_chunk.num_bytes - once.num_bytes == sums - 3 * 2 * logits  # the place counts as read, too
    assert of_logits.peak <= of_sums.peak
