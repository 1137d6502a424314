"""Defines how activations and their gradients are coded on a link, and the size in bytes. No torch here.

A codec belongs to a cut: all links between the workers of two neighbouring stages use one codec.
"""

from enum import IntEnum
from typing import Final

from headway.stages.spec import TrainSpec

BLOCK: Final = 64
"""Number of consecutive values that share a scale under INT8."""
FP32_BYTES: Final = 4


class Codec(IntEnum):
    """The codecs. The numbers are those of data.proto."""

    NONE = 0  # unchanged
    BF16 = 1  # rounded to bfloat16
    INT8 = 2  # blocks of BLOCK values: one float32 scale, and an int8 each


def codec_between(train: TrainSpec, *, is_between_sites: bool) -> Codec:
    """Return the codec of a cut. is_between_sites: some two of its workers are on different sites."""
    if train.wire == "none" or (train.wire_between == "sites" and not is_between_sites):
        return Codec.NONE
    if train.wire == "int8":
        return Codec.INT8
    return Codec.NONE if train.dtype == "bfloat16" else Codec.BF16


def is_rounding(train: TrainSpec) -> bool:
    """Return whether some cut could have a codec, so that the job's bits would depend on its cuts."""
    return codec_between(train, is_between_sites=True) is not Codec.NONE


def num_blocks(num_values: int) -> int:
    """Return the number of scales for a number of values; the last block may be shorter."""
    return -(-num_values // BLOCK)


def coded_bytes(codec: Codec, num_values: int, value_bytes: int) -> int:
    """Return the bytes of values on a link. value_bytes: bytes of one uncoded value."""
    match codec:
        case Codec.NONE:
            return num_values * value_bytes
        case Codec.BF16:
            return 2 * num_values
        case Codec.INT8:
            return num_values + FP32_BYTES * num_blocks(num_values)


def feedback_bytes(train: TrainSpec, num_values: int) -> int:
    """Return the bytes that a cut's lower side keeps per reduction group for error feedback. num_values: of one
    gradient.
    """
    return FP32_BYTES * num_values if train.wire == "int8" and train.wire_feedback else 0


def num_coded_tensors(codec: Codec) -> int:
    """Return the number of tensors that `compression.encode` makes of one."""
    return 2 if codec is Codec.INT8 else 1
