"""The shares of coming updates that the replicas of a stage send each other, by batch, until the update takes them.

Only tensors and accounts are here: no link, no clock. What arrives is still being copied to the device when it is
added; an update takes it when all of it is there.
"""

from torch import Tensor

from headway.stages.device.cpu import Held
from headway.stages.device.device import DeviceCopy
from headway.stages.update_shares import UpdateShares


class UpdateExchange:
    """One replica's part, for all batches of a generation."""

    def __init__(self, shares: UpdateShares, *, replica_index: int, first_batch: int) -> None:
        self._index = replica_index
        owners = [replica for replica, length in enumerate(shares.num_elements) if length]
        self._next = dict.fromkeys(owners, first_batch)
        """Each replica that owns matrices, and the batch of its next share."""
        self._num_replicas = len(shares.num_elements)
        self._arrived: dict[int, dict[int, DeviceCopy]] = {}
        """Batch to replica to its share."""

    @property
    def is_empty(self) -> bool:
        """Return whether no share waits for its update."""
        return not self._arrived

    def expects(self, replica: int, batch: int) -> bool:
        """Return whether a share would be another replica's next one. The caller limits how far it may be ahead."""
        return replica != self._index and batch == self._next.get(replica)

    def missing(self, batch: int) -> int | None:
        """Return the first replica whose share of a batch's update is not here; None when all are."""
        return next((replica for replica, next_batch in self._next.items() if next_batch <= batch), None)

    def add_own(self, batch: int, share: Tensor) -> None:
        """Add what this replica has computed; it may own nothing."""
        if self._index in self._next:
            self.add(batch, self._index, Held((share,)))

    def add(self, batch: int, replica: int, share: DeviceCopy) -> None:
        """Add a replica's share."""
        assert batch == self._next[replica], f"share of update {batch} from replica {replica} out of order"
        self._next[replica] = batch + 1
        self._arrived.setdefault(batch, {})[replica] = share

    def is_whole(self, batch: int) -> bool:
        """Return whether all shares of a batch's update are on the device."""
        return self.missing(batch) is None and all(copy.is_done for copy in self._arrived[batch].values())

    def take(self, batch: int) -> dict[int, Tensor]:
        """Return the shares of a batch's update, by replica."""
        return {replica: copy.take()[0] for replica, copy in self._arrived.pop(batch).items()}
