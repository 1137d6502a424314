"""The interface between a stage and the optimizers: stages never imports optim, and takes one of these per layer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, Self

from torch import Tensor, zeros_like

from headway.stages.ids import LayerName


class LayerOptimizer(Protocol):
    """One layer's optimizer. Its state is keyed by parameter name, so that it can move with the layer."""

    def step(
        self,
        update_index: int,
        *,
        current: Mapping[str, Tensor],
        target: Mapping[str, Tensor],
        gradients: Mapping[str, Tensor],
    ) -> None:
        """Fill `target` with W_{b+1}, computed from `current` = W_b and the batch's finished gradient.

        update_index is b: it indexes learning rate, warm-up and bias correction. All three maps go from parameter name
        to a tensor of that parameter's shape; gradients are fp32. `current` does not change unless `target` is that
        very tensor (a bf16 job's fp32 master is updated in place). Never called out of order.
        """
        ...

    @classmethod
    def step_together(
        cls,
        optimizers: Sequence[Self],
        update_index: int,
        *,
        current: Sequence[Mapping[str, Tensor]],
        target: Sequence[Mapping[str, Tensor]],
        gradients: Sequence[Mapping[str, Tensor]],
        owners: Sequence[int] = (),
        shares: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Do `step` of several layers, with the maps of each. The bits must not differ: a stage's layers depend on the
        cut.

        shares: by replica, what `orthogonalize_share` has returned for all matrices that it owns; None: everything is
        computed here. owners: the replica of each matrix.
        """
        assert shares is None, "this optimizer shares no update"
        assert not owners
        for optimizer, weights, new, sums in zip(optimizers, current, target, gradients, strict=True):
            optimizer.step(update_index, current=weights, target=new, gradients=sums)

    @classmethod
    def orthogonalize_share(
        cls,
        optimizers: Sequence[Self],
        update_index: int,
        *,
        gradients: Sequence[Mapping[str, Tensor]],
        matrices: Sequence[int],
    ) -> Tensor:
        """Return the part of a coming `step_together` that takes its time, for some matrices, as one row.

        matrices: by their order in the stage. Neither weights nor state change.
        """
        assert not matrices, f"update {update_index}: the optimizers of {len(optimizers)} layers share none of it"
        return zeros_like(next(iter(gradients[0].values()))).view(-1)[:0]

    def state(self) -> dict[str, Tensor]:
        """Return the live state, flat: `<slot>/<parameter name>` to tensor. Not copies: the caller may stream them."""
        ...

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load the `state()` of an equal optimizer. Tensors are copied. Raises KeyError on a gap."""
        ...


OptimizerFactory = Callable[[LayerName, Mapping[str, Tensor]], LayerOptimizer]
"""Makes the optimizer of a layer from its name and its parameters (shapes, dtypes and devices are read, not values)."""
