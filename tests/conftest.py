"""What every test has: no network, a known random state, a writer of small files."""

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(autouse=True)
def known_random_state() -> None:
    """Starts every test from the same seeds; torch only where the test's module imported it."""
    random.seed(0)
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str | bytes], Path]:
    """Writes a file below the test's own directory and returns its path."""

    def write(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        return path

    return write


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that a user makes, a few steps of each (``tiny_stages``); not to be changed."""
    from accelerate.state import AcceleratorState

    from tests.tiny_stages import run_all

    AcceleratorState._reset_state(True)
    path = tmp_path_factory.mktemp("stages")
    run_all(path)
    return path
