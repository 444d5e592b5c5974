"""Runs a function in several processes that talk over gloo, as torchrun would start them.

The processes are forked from a server that has imported everything once: an import of torch,
diffusers and transformers per process would be most of a test's time.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "tests.rank_work",
        "tests.tiny_stages",
        "animegamer.models.backbones",
        "animegamer.models.mllm_files",
        "animegamer.models.state_model",
        "animegamer.validation",
        "peft",
        "torch.utils.tensorboard",
    ]
)


class RankError(AssertionError):
    """What a process raised."""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def run(
    world: int, function: Callable[..., Any], *arguments: Any, timeout: float = 120, **environ: str
) -> list[Any]:
    """The function's results, by rank.

    Raises:
        RankError: with the traceback of the first process that failed.
    """
    shared = {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        **environ,
    }
    processes, pipes = [], []
    for rank in range(world):
        here, there = _context.Pipe(duplex=False)
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = _context.Process(target=_child, args=(there, own, function, arguments))
        process.start()
        there.close()
        processes.append(process)
        pipes.append(here)
    results: dict[int, Any] = {}
    try:
        while len(results) < world:
            ready = wait([p for r, p in enumerate(pipes) if r not in results], timeout)
            if not ready:
                raise RankError(
                    f"no answer in {timeout} s from ranks {set(range(world)) - set(results)}"
                )
            for pipe in ready:
                rank = pipes.index(pipe)
                try:
                    error, results[rank] = pipe.recv()
                except EOFError:
                    error, results[rank] = f"rank {rank} died", None
                if error:
                    raise RankError(f"rank {rank}:\n{error}")
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    return [results[rank] for rank in range(world)]


def _child(
    pipe: Connection, environ: dict[str, str], function: Callable[..., Any], arguments: Any
) -> None:
    import torch

    os.environ.update(environ)
    torch.set_num_threads(1)
    try:
        pipe.send((None, function(*arguments)))
    except BaseException:
        pipe.send((traceback.format_exc(), None))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
