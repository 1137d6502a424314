"""What data sheets say of cards, by the names that their drivers give them. Pure.

Compared on 2026-11-29 with NVIDIA's product brief of the H100 PCIe (PB-11133-001), and where its own pages were not at
hand with sellers' and reviewers' tables of its data sheets.
"""

import re
from typing import Final

_REACHED: Final = 0.85
"""Part of the data sheet's bandwidth that large copies reach."""
_GB_S: Final = (
    (r"GH200", 4000),
    (r"B[23]00", 8000),
    (r"H200", 4800),
    (r"H20\b", 4000),
    (r"H[18]00.*PCIe", 2000),
    (r"H[18]00.*NVL", 3900),
    (r"H[18]00", 3350),
    (r"A[18]00.*80GB.*PCIe", 1935),
    (r"A[18]00.*80GB", 2039),
    (r"A[18]00", 1555),
    (r"A30\b", 933),
    (r"A40\b", 696),
    (r"A10G?\b", 600),
    (r"L40S?\b", 864),
    (r"L4\b", 300),
    (r"V100", 900),
    (r"T4\b", 320),
    (r"RTX PRO 6000", 1792),
    (r"RTX 6000 Ada", 960),
    (r"RTX A6000", 768),
    (r"RTX 5090", 1792),
    (r"RTX 5080", 960),
    (r"RTX 4090", 1008),
    (r"RTX 4080 SUPER", 736),
    (r"RTX 4080", 717),
    (r"RTX 3090", 936),
)
"""Data sheets' 10⁹ bytes a second; the first that a name contains counts. Laptops' cards and parts of a card differ."""


def memory_gb_s_of(model: str) -> float:
    """Return the 10⁹ bytes a second that copies reach on a card of this model; 0: it is not known."""
    if re.search(r"MIG|Laptop", model):
        return 0.0
    return next((_REACHED * rate for name, rate in _GB_S if re.search(rf"\b{name}", model)), 0.0)
