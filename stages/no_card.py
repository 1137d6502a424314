"""Says why torch finds no CUDA device: its build, a variable that hides the cards, or the driver."""

import os

import torch


def why_no_card() -> str:
    """Return why torch finds no CUDA device, for people."""
    if torch.version.cuda is None:
        return "torch is built without CUDA; a card needs a build with it"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        return f"CUDA_VISIBLE_DEVICES is {hidden!r}"
    return f"torch is built for CUDA {torch.version.cuda}, and finds no device; `nvidia-smi` shows driver and cards"
