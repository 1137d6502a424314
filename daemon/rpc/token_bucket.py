"""A token bucket: it tells each sender how long to wait first. Pure."""


class TokenBucket:
    """Tokens come at a rate, into a bucket of limited size; a sender that takes more than is there waits for the rest.

    Taken tokens are gone, with or without the wait; waits are served in the order of the requests.
    """

    def __init__(self, *, bytes_per_s: float, burst_bytes: float, now: float) -> None:
        """burst_bytes: bytes that may be sent at once after a pause. now: seconds of the clock of `take`."""
        self._bytes_per_s = bytes_per_s
        self._burst_bytes = burst_bytes
        self._level = burst_bytes
        """Level of the bucket; negative: bytes for which a sender already waits."""
        self._since = now

    def take(self, num_bytes: int, now: float) -> float:
        """Return the seconds to wait before these bytes may go."""
        self._level = min(self._burst_bytes, self._level + (now - self._since) * self._bytes_per_s)
        self._since = now
        self._level -= num_bytes
        return max(0.0, -self._level / self._bytes_per_s)
