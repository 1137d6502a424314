"""What the table of kernels makes of their names."""

import pytest
from gpu.kernels import ATTENTION, PRODUCTS, Kernel, longest, share_of

FLASH = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, cutlass::bfloat16_t>>(Flash_fwd_params)"


@pytest.mark.parametrize(
    "name",
    ["nvjet_tst_192x192_64x4_2x1_v_bz_TNT", "ampere_sgemm_128x64_tn", "sm80_xmma_gemm_f32f32_f32f32", "aten::addmm"],
)
def test_products_and_attention_are_told_by_their_names(name: str) -> None:
    """Flash attention is written with cutlass, and is no matrix product; a copy is neither."""
    kernels = [Kernel(name, 4, 3.0), Kernel(FLASH, 1, 1.0), Kernel("aten::copy_", 1, 1.0)]
    assert share_of(PRODUCTS, kernels, without=ATTENTION) == pytest.approx(0.6)
    assert share_of(ATTENTION, kernels) == pytest.approx(0.2)


def test_the_longest_kernels_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    """Twenty of them, and a line each for people."""
    found = longest([Kernel(f"k{number}", 1, float(number)) for number in range(30)])
    assert [kernel["name"] for kernel in found[:2]] == ["k29", "k28"]
    assert len(found) == len(capsys.readouterr().err.splitlines()) == 20
