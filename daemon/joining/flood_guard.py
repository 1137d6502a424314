"""How many strangers are heard: so many a second, and a few more at once after a pause. Pure."""


class FloodGuard:
    """Counts those that are heard, and no others: so a flood leaves nothing behind."""

    def __init__(self, *, per_s: float, burst: int, now: float) -> None:
        """now: seconds of the clock of `lets_in`."""
        self._per_s = per_s
        self._burst = burst
        self._level = float(burst)
        self._since = now

    def lets_in(self, now: float) -> bool:
        """Return whether one more is heard now."""
        self._level = min(self._burst, self._level + (now - self._since) * self._per_s)
        self._since = now
        if self._level < 1.0:
            return False
        self._level -= 1.0
        return True
