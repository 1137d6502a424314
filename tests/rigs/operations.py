"""Counts what a computation launches, and the bytes that it moves beside its products, also on meta tensors."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

PRODUCTS = ("mm", "bmm", "addmm")
NO_LAUNCH = (
    "view",
    "_unsafe_view",
    "t",
    "transpose",
    "detach",
    "as_strided",
    "slice",
    "split",
    "alias",
    "expand",
    "empty",
    "empty_like",
    "new_empty",
)


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Launches, and the bytes that those beside products read and write."""

    now: "Operations | None" = None

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_launches = self.num_products = self.num_bytes = 0

    def __enter__(self) -> "Operations":
        Operations.now = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        Operations.now = None

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        made = func(*args, **(kwargs or {}))  # type: ignore[arg-type]
        name = func.overloadpacket.__name__  # type: ignore[attr-defined]
        if name not in NO_LAUNCH:
            self.num_products += name in PRODUCTS
            self.launched(*(() if name in PRODUCTS else (*args, made)))
        return made

    def launched(self, *tensors: object) -> None:
        self.num_launches += 1
        self.num_bytes += sum(each.nbytes for each in tensors if isinstance(each, Tensor))


def launched(*tensors: Tensor) -> None:
    """A fused kernel that reads and writes these, beside whatever counts now."""
    if Operations.now is not None:
        Operations.now.launched(*tensors)
