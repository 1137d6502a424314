"""A token bucket: who wants to send is told how long to wait first. Pure."""


class TokenBucket:
    """Bytes come in at a rate, into a bucket of limited size; whoever takes more than is there waits for the rest.

    What is taken is gone, waited for or not; waits are served in the order in which they were asked for.
    """

    def __init__(self, *, bytes_per_s: float, burst_bytes: float, now: float) -> None:
        """burst_bytes: what may be sent at once after a pause. now: seconds of the clock that `take` is told of too."""
        self._bytes_per_s = bytes_per_s
        self._burst_bytes = burst_bytes
        self._level = burst_bytes
        """Negative: bytes that somebody already waits for."""
        self._since = now

    def take(self, num_bytes: int, now: float) -> float:
        """Seconds to wait before so many bytes may go."""
        self._level = min(self._burst_bytes, self._level + (now - self._since) * self._bytes_per_s)
        self._since = now
        self._level -= num_bytes
        return max(0.0, -self._level / self._bytes_per_s)
