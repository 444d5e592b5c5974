"""Packaging: ``pip install -e .``; the tested versions are pinned in requirements.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
VERSION = re.search(
    r'^__version__ = "(.+)"', (ROOT / "animegamer/__init__.py").read_text("utf-8"), re.MULTILINE
)
README = ROOT / "README.md"

setup(
    name="animegamer",
    version=VERSION[1] if VERSION else "0",
    description="Reference implementation of AnimeGamer (arXiv 2504.01014): infinite anime life "
    "simulation with next game state prediction",
    long_description=README.read_text("utf-8") if README.is_file() else "",
    long_description_content_type="text/markdown",
    author="The AnimeGamer reference implementation authors",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(
        include=["animegamer", "animegamer.*", "data_pipeline", "data_pipeline.*"]
    ),
    install_requires=[
        "torch>=2.11",
        "torchvision>=0.26",
        "transformers>=5.17",
        "diffusers>=0.38",
        "peft>=0.19",
        "accelerate>=1.12",
        "open_clip_torch>=3.3",
        "tokenizers>=0.22",
        "sentencepiece>=0.2.1",
        "protobuf>=6.31",
        "safetensors>=0.7",
        "einops>=0.8",
        "numpy>=2.0",
        "decord>=0.6",
        "av>=14",
        "opencv-python-headless>=4.11",
        "pillow>=11",
        "pyyaml>=6.0.2",
        "tqdm>=4.67",
        "tensorboard>=2.19",
        "matplotlib>=3.10",
    ],
    extras_require={
        "quantised": ["bitsandbytes>=0.48"],  # int8 and nf4 weights of the MLLM, on a GPU
        "deepspeed": ["deepspeed>=0.19"],  # ZeRO (train.parallel=deepspeed); builds on the machine
        "dev": ["pytest>=9", "ruff>=0.15", "mypy>=1.19", "types-PyYAML>=6.0.12", "pre-commit>=4"],
    },
)
