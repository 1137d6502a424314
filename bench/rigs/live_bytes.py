"""Counts the bytes of tensors by the worker that made them: exactly, storage by storage, on a CPU."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation below autograd, in forward and backward, and each storage from its making to its end.

    Temporary memory inside one kernel is not seen; a card's `max_memory_allocated` has it.
    """

    def __init__(self, num_workers: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.worker = 0
        """The worker whose operations run now."""
        self.peaks = [0] * num_workers
        self._live = [0] * num_workers
        self._known: set[int] = set()

    @contextmanager
    def of(self, worker: int) -> Iterator[None]:
        """Count what is made inside for a worker."""
        before, self.worker = self.worker, worker
        try:
            yield
        finally:
            self.worker = before

    def begin(self) -> None:
        """Forget the peaks so far: layers are built with more than a stage keeps."""
        self.peaks = list(self._live)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        _types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                self._note(tensor.untyped_storage())
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        address, num_bytes, worker = storage.data_ptr(), storage.nbytes(), self.worker
        if not num_bytes or address in self._known:
            return
        self._known.add(address)
        self._live[worker] += num_bytes
        self.peaks[worker] = max(self.peaks[worker], self._live[worker])
        weakref.finalize(storage, self._freed, address, num_bytes, worker)

    def _freed(self, address: int, num_bytes: int, worker: int) -> None:
        self._known.discard(address)
        self._live[worker] -= num_bytes
