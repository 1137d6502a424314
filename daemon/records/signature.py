"""What the signature under a submission is worth, as its reader found. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Signature:
    """One signature, after it was checked."""

    fault: str = ""
    """Why the submission is not an operator's own words, as a sentence's end; empty: it is."""
    names: frozenset[str] = frozenset()
    """Every name in the signer's certificate, in small letters: it does not count if one of them is revoked."""
