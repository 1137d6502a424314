"""How activations and their gradients are coded on a link, and how many bytes that takes. No torch here.

A codec belongs to a cut: the links between the workers of two neighbouring stages all have the same one.
"""

from enum import IntEnum
from typing import Final

from headway.stages.spec import TrainSpec

BLOCK: Final = 64
"""Consecutive values that share a scale under INT8."""
FP32_BYTES: Final = 4


class Codec(IntEnum):
    """The numbers are those of data.proto."""

    NONE = 0  # as they are
    BF16 = 1  # rounded to bfloat16
    INT8 = 2  # blocks of BLOCK values: one float32 scale, and an int8 each


def codec_between(train: TrainSpec, *, is_between_sites: bool) -> Codec:
    """Of a cut. is_between_sites: some two of the workers that it lies between are on different sites."""
    if train.wire == "none" or (train.wire_between == "sites" and not is_between_sites):
        return Codec.NONE
    if train.wire == "int8":
        return Codec.INT8
    return Codec.NONE if train.dtype == "bfloat16" else Codec.BF16


def is_rounding(train: TrainSpec) -> bool:
    """Whether some cut could have a codec, so that the job's bits would depend on where it is cut."""
    return codec_between(train, is_between_sites=True) is not Codec.NONE


def num_blocks(num_values: int) -> int:
    """Scales that so many values have; the last block may be shorter."""
    return -(-num_values // BLOCK)


def coded_bytes(codec: Codec, num_values: int, value_bytes: int) -> int:
    """What so many values take on a link. value_bytes: of one that is not coded."""
    match codec:
        case Codec.NONE:
            return num_values * value_bytes
        case Codec.BF16:
            return 2 * num_values
        case Codec.INT8:
            return num_values + FP32_BYTES * num_blocks(num_values)


def feedback_bytes(train: TrainSpec, num_values: int) -> int:
    """What a cut's lower side keeps per reduction group for error feedback. num_values: of one gradient."""
    return FP32_BYTES * num_values if train.wire == "int8" and train.wire_feedback else 0
