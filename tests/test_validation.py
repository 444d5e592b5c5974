"""Validation during training: where the autoencoder works, and where it waits."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from animegamer.validation import ShotValidation


class Device:
    """Stands for a network that can only say where it is."""

    def __init__(self):
        self.places = ["cpu"]

    def to(self, device):
        self.places.append(str(device))


def test_the_autoencoder_works_where_the_latents_are_and_leaves_again():
    model, at_work = Device(), []

    def decode(latents):
        at_work.append((model.places[-1], len(latents)))
        return torch.zeros(len(latents), 3, 5, 4, 6)

    validation = object.__new__(ShotValidation)
    validation.autoencoder = SimpleNamespace(model=model, decode=decode)
    pixels = validation._pixels(torch.zeros(9, 2, 4, 1, 1, device="meta"))
    assert at_work == [("meta", 8), ("meta", 1)]
    assert model.places == ["cpu", "meta", "cpu"]
    assert pixels.shape == (9, 5, 4, 6, 3) and pixels.dtype == np.uint8
