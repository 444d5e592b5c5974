"""Clips to feature shards: ``f_v``, ``f_md`` and latents of every shot, made once.

Run: ``python -m data_pipeline.features --config configs/tiny/features.yaml``. Interrupt and run
again at will: finished shots are skipped, changed clips and action texts are made again.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from animegamer.config import BackbonesConfig, Config

DECODING = ("decoder.", "pixel_net.", "post_quant_conv.")
"""Weights of the autoencoders that encoding does not touch."""


def feature_source(backbones: BackbonesConfig) -> dict[str, str]:
    """Fingerprints of the networks that make the features; a store of other networks is refused.

    Of the autoencoder only what encodes counts: latents outlive a better decoder.
    """
    from animegamer.checkpoint import fingerprint, tensors_fingerprint

    return {
        "autoencoder": tensors_fingerprint(backbones.autoencoder, without=DECODING),
        "image_encoder": fingerprint(backbones.image_encoder),
        "text_encoder": fingerprint(backbones.text_encoder),
    }


def _read(job: tuple[Path, str, int]) -> tuple[str, np.ndarray]:
    """The hash of what the features are made from, and the frames."""
    from animegamer.video import read_video

    path, action, frames = job
    video = read_video(path, frames)
    content = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return f"{content}-{hashlib.sha256(action.encode()).hexdigest()[:8]}", video


def make_features(config: Config, directory: str) -> None:
    """Makes the features of one split.

    Args:
        config: backbones, where the features go, shots encoded together, workers for decoding.
        directory: with ``shots.jsonl`` and its clips.
    """
    import numpy as np
    import torch
    from tqdm import tqdm

    from animegamer.features import FeatureWriter, write_empty_text
    from animegamer.models import backbones
    from animegamer.records import read_shots
    from animegamer.video import to_float

    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    autoencoder = backbones.load_autoencoder(config.backbones).to(device)
    image_encoder = backbones.load_image_encoder(config.backbones).to(device)
    text_encoder = backbones.load_text_encoder(config.backbones).to(device)
    shots = read_shots(Path(directory) / "shots.jsonl")
    writer = FeatureWriter(config.data.features, feature_source(config.backbones))
    states: dict[str, np.ndarray] = {}

    def half(tensor: torch.Tensor) -> np.ndarray:
        return tensor.half().cpu().numpy()

    jobs = [(Path(directory) / shot.clip, shot.action, config.shot.frames) for shot in shots]
    bar = tqdm(total=len(shots), desc=f"features of {directory}", unit="shot")
    with ThreadPoolExecutor(config.data.workers) as pool:
        for rows in _chunks(len(shots), config.data.feature_batch):
            read = list(pool.map(_read, [jobs[r] for r in rows]))
            todo = [
                (shots[r], content, frames)
                for r, (content, frames) in zip(rows, read, strict=True)
                if not writer.has(shots[r].shot_id, content)
            ]
            bar.update(len(rows))
            if not todo:
                continue
            clips = torch.from_numpy(to_float(np.stack([frames for _, _, frames in todo])))
            video = clips.permute(0, 4, 1, 2, 3).to(device)
            latents = half(autoencoder.encode(video))
            f_v = half(image_encoder(video[:, :, 0]))
            chosen = [int(content[:8], 16) % config.shot.frames for _, content, _ in todo]
            f_v_random = half(image_encoder(video[range(len(todo)), :, chosen]))
            for i, (shot, content, _) in enumerate(todo):
                if shot.action not in states:
                    states[shot.action] = half(text_encoder([shot.action]))[0]
                writer.add(
                    shot.shot_id,
                    content,
                    {
                        "latents": latents[i],
                        "f_v": f_v[i],
                        "f_v_random": f_v_random[i],
                        "f_md": states[shot.action],
                    },
                )
    writer.flush()
    bar.close()
    write_empty_text(config.data.features, half(text_encoder([""]))[0])


def _chunks(total: int, size: int) -> Iterator[range]:
    for start in range(0, total, size):
        yield range(start, min(total, start + size))


def main(arguments: list[str] | None = None) -> Any:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="configs/tiny/features.yaml")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    options = parser.parse_args(arguments)
    from animegamer.config import load

    config = load(options.config, options.overrides)
    for directory in (config.data.train, config.data.validation):
        make_features(config, directory)


if __name__ == "__main__":
    main()
