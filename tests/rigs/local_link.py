"""Links between stages of one process: what is sent lies in the neighbour's inbox at once."""

from headway.stages.links.link import Frame, Inbox


class LocalLink:
    """One end. Tensors are handed over as they are: both stages then share their memory, and neither writes to it."""

    def __init__(self, peer: str, peer_inbox: Inbox) -> None:
        self.peer = peer
        self._peer_inbox = peer_inbox
        self._is_closed = False

    def send(self, frame: Frame) -> None:
        """Put the frame into the neighbour's inbox."""
        if not self._is_closed:
            self._peer_inbox.put(frame)

    def close(self) -> None:
        """Stop sending. Idempotent."""
        self._is_closed = True
