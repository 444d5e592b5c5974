"""The reference tensors of ``tests/data/parity`` in float32, float16 and bfloat16 on a device.

The figure is the relative error: the norm of the difference over the norm of the reference, which
the authors' code computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from animegamer.config import BackbonesConfig
from animegamer.models.backbones import load_autoencoder
from animegamer.models.decoder_files import load_decoder
from animegamer.models.mllm import NextStateMLLM
from benchmarks.report import NotHere
from tests.data.parity.parity_load import load
from tests.parity_files import (
    autoencoder_directory,
    batch_of,
    decoder_checkpoint,
    history_of,
    mllm_directory,
)

# Several times what a CPU shows, which accumulates in another order. On a GPU torch's convolutions
# of float32 numbers round to TF32.
TOLERANCES = {
    torch.float32: {"decoder": 2e-3, "MLLM": 1e-4, "MLLM loss": 1e-4, "autoencoder": 5e-3},
    torch.float16: {"decoder": 5e-3, "MLLM": 0.01, "MLLM loss": 1e-3, "autoencoder": 0.01},
    torch.bfloat16: {"decoder": 0.03, "MLLM": 0.06, "MLLM loss": 5e-3, "autoencoder": 0.05},
}


def comparisons(device: str) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """A name and a comparison for every network and type."""
    with TemporaryDirectory() as directory:
        made = cache(lambda kind: _FILES[kind](Path(directory)))
        for what, compare in _COMPARISONS.items():
            for dtype in TOLERANCES:
                name = f"{what}, {str(dtype).removeprefix('torch.')}"
                yield (
                    name,
                    lambda what=what, compare=compare, dtype=dtype: judged(
                        compare(made, device, dtype), TOLERANCES[dtype][what]
                    ),
                )


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    expected = expected.float()
    return float((found.detach().float().cpu() - expected).norm() / expected.norm())


def judged(errors: dict[str, float], tolerance: float) -> dict[str, Any]:
    """The largest of the cases' errors, against its tolerance."""
    worst = max(errors, key=lambda case: math.inf if math.isnan(errors[case]) else errors[case])
    return {
        "worst case": worst,
        "error": errors[worst],
        "tolerance": tolerance,
        "passed": errors[worst] <= tolerance,  # what is not a number is not
    }


@torch.no_grad()
def _decoder(made: Any, device: str, dtype: torch.dtype) -> dict[str, float]:
    dit, directory = made("decoder")
    decoder = load_decoder(directory / "decoder", dtype=dtype).to(device).eval()
    errors = {}
    for case in ("plain_b1", "aroutput_cfg2"):
        z, t, f_ms = (dit[f"{case}.in.{name}"].to(device) for name in ("x", "timesteps", "flow"))
        s_a = dit[f"{case}.out.mixed_embedding"].to(device)
        v = decoder.predict(z.to(dtype), t, s_a, f_ms)
        errors[case] = relative(v, dit[f"{case}.out.noise_pred"])
    return errors


@torch.no_grad()
def _mllm(made: Any, device: str, dtype: torch.dtype) -> dict[str, float]:
    (tensors, about), directory = made("MLLM")
    mllm = NextStateMLLM.from_pretrained(directory, dtype=dtype).to(device)
    errors = {}
    for case in ("t1", "t3", "t4"):
        batch = batch_of(tensors, case, history_of(about, case)).to(device)
        hidden = mllm.hidden_states(batch)
        predicted = mllm.output_projection(hidden[batch.query >= 0])[tensors["pred_rows"]]
        errors[case] = relative(hidden, tensors[f"{case}.out.last_hidden"])
        errors[f"{case}, s_a_hat"] = relative(
            predicted, tensors[f"{case}.out.pred_at_gen_mask_rows"]
        )
    return errors


def _loss(made: Any, device: str, dtype: torch.dtype) -> dict[str, float]:
    """The loss of float32 weights under autocast, as in training."""
    (tensors, about), directory = made("MLLM")
    mllm = NextStateMLLM.from_pretrained(directory).to(device)
    errors = {}
    for case in ("train_b1", "train_b2"):
        batch = batch_of(tensors, case, [0, 1, 2]).to(device)
        half = dtype != torch.float32
        with torch.autocast(torch.device(device).type, dtype if half else None, enabled=half):
            loss, _ = mllm(batch)
        expected = torch.tensor(about[f"case {case}"]["losses"]["total_loss"])
        errors[case] = relative(loss, expected)
    return errors


@torch.no_grad()
def _autoencoder(made: Any, device: str, dtype: torch.dtype) -> dict[str, float]:
    if dtype != torch.float32 and torch.device(device).type == "cpu":
        raise NotHere("half convolutions take minutes on a CPU")
    tensors, directory = made("autoencoder")
    ours = load_autoencoder(BackbonesConfig(autoencoder=str(directory)), dtype).to(device)
    decoded = ours.decode(tensors["in.latent"].transpose(1, 2).to(device) * ours.scale)
    return {"decoded": relative(decoded, tensors["out.decoded_chunked"].clamp(-1, 1))}


def _decoder_files(place: Path) -> Any:
    dit = load("dit")[0]
    return dit, decoder_checkpoint(dit, place / "dit")


def _mllm_files(place: Path) -> Any:
    fixture = load("mllm")
    (place / "mllm").mkdir()
    return fixture, mllm_directory(fixture, place / "mllm")


def _autoencoder_files(place: Path) -> Any:
    tensors = load("vae")[0]
    (place / "vae").mkdir()
    return tensors, autoencoder_directory(tensors, place / "vae")


_FILES: dict[str, Callable[[Path], Any]] = {
    "decoder": _decoder_files,
    "MLLM": _mllm_files,
    "autoencoder": _autoencoder_files,
}
_COMPARISONS = {
    "decoder": _decoder,
    "MLLM": _mllm,
    "MLLM loss": _loss,
    "autoencoder": _autoencoder,
}
