"""The two live versions of one layer's weights.

W_k lives in tensor set k mod 2: update(b) reads W_b and writes W_{b+1} over W_{b-1}. A graph keeps pointing at the set
that its forward was given; nothing is swapped under it. Because a set's tensors are written in place, autograd's own
version counters refuse a backward through a set that was overwritten too early.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from headway.stages.state.optimizer import LayerOptimizer

ParameterSet = dict[str, Parameter]
"""Parameter name to leaf tensor."""


class WeightVersions:
    """W_k for the newest k, and the set that holds W_{k-1} or is about to hold W_{k+1}.

    In a float32 job the sets are the weights. In a bfloat16 job there is also one fp32 master, updated in place, and
    the sets are its casts.
    """

    def __init__(
        self,
        current: Mapping[str, Tensor],
        *,
        version: int,
        dtype: torch.dtype,
        previous: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Start with `current` = W_version in fp32, and `previous` = W_{version-1} in the job's dtype where it matters.

        The object owns the tensors: no other code may write to them.
        """
        self.version = version
        self.master: dict[str, Tensor] | None = None
        if dtype != torch.float32:
            self.master = dict(current)
            current = {name: tensor.to(dtype) for name, tensor in current.items()}
        older = previous if previous is not None else {name: torch.empty_like(t) for name, t in current.items()}
        if {name: (t.shape, t.dtype) for name, t in older.items()} != {
            n: (t.shape, t.dtype) for n, t in current.items()
        }:
            raise ValueError("the two versions of the weights differ in names, shapes or dtypes")
        newest, other = _leaves(current), _leaves({name: older[name] for name in current})
        self.sets = (newest, other) if version % 2 == 0 else (other, newest)
        # The optimizers get aliases that need no gradient; they share the version counters that autograd checks.
        self._plain = tuple({name: tensor.detach() for name, tensor in held.items()} for held in self.sets)
        self._held: list[int | None] = [None, None]
        self._held[version % 2] = version
        if previous is not None:
            self._held[(version + 1) % 2] = version - 1

    def holds(self, version: int) -> bool:
        """Return whether W_version can be read."""
        return self._held[version % 2] == version

    def plain(self, version: int) -> Mapping[str, Tensor]:
        """Return W_version as tensors that need no gradient, in the job's dtype. Live: not copies."""
        assert self.holds(version), f"W_{version} is not live: the sets hold {self._held}"
        return self._plain[version % 2]

    def exact(self, version: int) -> Mapping[str, Tensor]:
        """Return the newest version in fp32: the master of a bfloat16 job. Live: not copies."""
        assert version == self.version, f"only W_{self.version} is kept in full precision"
        return self.plain(version) if self.master is None else self.master

    def update(self, batch: int, optimizer: LayerOptimizer, gradients: Mapping[str, Tensor]) -> None:
        """Make W_{b+1} from W_b with the finished fp32 gradient of batch b, over the set of W_{b-1}.

        Nothing may read W_{b-1} any more.
        """
        current, target = self.begin_update(batch)
        optimizer.step(batch, current=current, target=target, gradients=gradients)
        self.end_update(batch)

    def begin_update(self, batch: int) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """Return the sources and targets of an update to W_{b+1}: in fp32, by parameter name."""
        assert batch == self.version, f"update {batch} on W_{self.version}"
        assert self.holds(batch)
        self._held[(batch + 1) % 2] = None
        if self.master is not None:
            return self.master, self.master
        return self._plain[batch % 2], self._plain[(batch + 1) % 2]

    def end_update(self, batch: int) -> None:
        """Note that the optimizer has made W_{b+1}: it is the newest version."""
        if self.master is not None:
            for name, tensor in self.master.items():
                self._plain[(batch + 1) % 2][name].copy_(tensor)
        self.version = batch + 1
        self._held[self.version % 2] = self.version


def _leaves(tensors: Mapping[str, Tensor]) -> ParameterSet:
    # `.data` gives each leaf a version counter of its own: an optimizer may have kept aliases of what it was made from.
    return {name: Parameter(tensor.data) for name, tensor in tensors.items()}
