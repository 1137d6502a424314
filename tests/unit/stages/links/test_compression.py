"""What a codec makes of hidden states and gradients: against a slow reference to the bit, and within its bound."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headway.stages.links.codec import BLOCK, Codec, codec_between, coded_bytes, num_blocks
from headway.stages.links.compression import LEAST_LARGEST, Feedback, decode, encode
from headway.stages.spec import TrainSpec

ULP = 2.0**-23


def fp32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


def slowly(values: list[float]) -> list[float]:
    """INT8 there and back, one value after the other, every operation rounded to float32."""
    out: list[float] = []
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK]
        largest = max(map(abs, block))
        if largest < LEAST_LARGEST:
            out += [0.0] * len(block)
            continue
        inverse, scale = fp32(127 / largest), fp32(largest / 127)
        out += [fp32(round(fp32(value * inverse)) * scale) for value in block]
    return out


def there_and_back(values: Tensor, codec: Codec) -> Tensor:
    return decode(encode(values, codec), codec, values.dtype)


@pytest.mark.parametrize("shape", [(2, 3, BLOCK), (1, 5), (3, 7, 11), (BLOCK,), (2, 1, 2 * BLOCK + 1)])
@pytest.mark.parametrize("magnitude", [1e-29, 1e-3, 1.0, 5e37])
def test_int8_has_the_bits_of_its_slow_reference(shape: tuple[int, ...], magnitude: float) -> None:
    """Whole and broken last blocks of values of any size → the values that one would compute by hand."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * magnitude
    quantised, scales = encode(values, Codec.INT8)
    assert (quantised.dtype, quantised.shape) == (torch.int8, values.shape)
    assert (scales.dtype, scales.shape) == (torch.float32, (num_blocks(values.numel()),))
    assert quantised.nbytes + scales.nbytes == coded_bytes(Codec.INT8, values.numel(), 4)
    back = there_and_back(values, Codec.INT8)
    assert back.shape == values.shape
    assert torch.equal(back.flatten(), torch.tensor(slowly(values.flatten().tolist())))


@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=3 * BLOCK),
    is_bf16=st.booleans(),
)
def test_int8_is_off_by_half_a_step_at_most(values: list[float], is_bf16: bool) -> None:
    """Any finite values → each within half its block's scale, plus what float32 (or bf16) itself rounds."""
    dtype = torch.bfloat16 if is_bf16 else torch.float32
    sent = torch.tensor(values).to(dtype)
    if not sent.isfinite().all():
        return
    back = there_and_back(sent, Codec.INT8).double()
    for start in range(0, len(values), BLOCK):
        block, decoded = sent[start : start + BLOCK].double(), back[start : start + BLOCK]
        largest = block.abs().max().item()
        rounding = (2.0**-8 if is_bf16 else 0.0) + 4 * ULP
        bound = largest / 254 + largest * rounding if largest >= LEAST_LARGEST else largest
        assert (decoded - block).abs().max().item() <= bound


@given(st.lists(st.floats(width=32, min_value=-(2.0**126), max_value=2.0**126), min_size=1, max_size=70))
def test_bf16_is_off_by_half_a_unit_in_its_last_place(values: list[float]) -> None:
    """Any finite values → each within 2⁻⁸ of itself, where it is no subnormal number."""
    sent = torch.tensor(values)
    back = there_and_back(sent, Codec.BF16)
    assert ((back - sent).abs() <= sent.abs() * 2.0**-8 + 2.0**-133).all()


@pytest.mark.parametrize("codec", [Codec.BF16, Codec.INT8])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(codec: Codec, bad: float) -> None:
    """One NaN or infinity among good values → it arrives as something that is not finite; other blocks are unharmed."""
    values = torch.ones(2 * BLOCK)
    values[5] = bad
    back = there_and_back(values, codec)
    assert not back[5].isfinite()
    assert torch.equal(back[BLOCK:], values[BLOCK:])


def test_zeros_and_almost_zeros_are_zeros() -> None:
    """A block without a value, and one below every normal float32 → zeros, not NaN."""
    values = torch.zeros(2 * BLOCK)
    values[BLOCK:] = 1e-42
    assert torch.equal(there_and_back(values, Codec.INT8), torch.zeros(2 * BLOCK))


def test_without_a_codec_the_very_tensor_travels() -> None:
    """Codec none → the same object both ways: no copy on the hot path."""
    values = torch.randn(4, 4)
    assert encode(values, Codec.NONE)[0] is values
    assert decode((values,), Codec.NONE, torch.float32) is values


def test_encoding_leaves_its_input_alone() -> None:
    """The caller goes on with hidden states and gradients that were encoded, with feedback too."""
    values = torch.randn(3, 50)
    before = values.clone()
    feedback = Feedback(Codec.INT8, num_groups=1)
    encode(values, Codec.INT8)
    feedback.encode(values, 0)
    feedback.encode(values, 1)
    assert torch.equal(values, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_feedback_leaves_no_error_but_the_last_one(dtype: torch.dtype) -> None:
    """Forty gradients of one group with an outlier in each block → the sum of what arrived is that of what was sent, up
    to a step of the code; without feedback what is below half a step is lost forty times."""
    gradients = [torch.full((4, BLOCK), 0.3 / 127).to(dtype) for _ in range(40)]
    for gradient in gradients:
        gradient[:, 0] = 1.0
    feedback = Feedback(Codec.INT8, num_groups=1)
    wanted = torch.stack(gradients).double().sum(0)
    fed = sum(decode(feedback.encode(each, i), Codec.INT8, dtype).double() for i, each in enumerate(gradients))
    plain = sum(there_and_back(each, Codec.INT8).double() for each in gradients)
    assert isinstance(fed, Tensor)
    assert isinstance(plain, Tensor)
    step = 1.01 / 127
    assert (fed - wanted).abs().max().item() <= step
    assert (plain - wanted).abs().max().item() > 10 * step


def test_groups_do_not_feed_each_other() -> None:
    """Microbatches of two groups in turn → each group's bits are those that it has alone."""
    gradients = torch.randn(6, 3, 40, generator=torch.Generator().manual_seed(1))
    both, odd = Feedback(Codec.INT8, num_groups=2), Feedback(Codec.INT8, num_groups=2)
    together = [both.encode(gradients[i], i) for i in range(6)]
    alone = [odd.encode(gradients[i], i) for i in (1, 3, 5)]
    for one, other in zip(together[1::2], alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("wire", "between", "dtype", "far", "codec"),
    [
        ("none", "stages", "float32", True, Codec.NONE),
        ("int8", "sites", "float32", True, Codec.INT8),
        ("int8", "sites", "float32", False, Codec.NONE),
        ("int8", "stages", "float32", False, Codec.INT8),
        ("bf16", "sites", "float32", True, Codec.BF16),
        ("bf16", "stages", "bfloat16", True, Codec.NONE),
        ("int8", "stages", "bfloat16", False, Codec.INT8),
    ],
)
def test_which_cuts_have_which_codec(wire: str, between: str, dtype: str, far: bool, codec: Codec) -> None:
    """Between sites or everywhere, as the job says; bf16 takes nothing from a bfloat16 job."""
    train = TrainSpec(wire=wire, wire_between=between, dtype=dtype)  # type: ignore[arg-type]
    assert codec_between(train, is_between_sites=far) is codec
