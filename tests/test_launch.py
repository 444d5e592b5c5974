"""What starts processes: Accelerate's configurations and the SLURM example."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "configs/accelerate").glob("*.yaml"))
MODES = {
    "ddp": ("multi_gpu", None),
    "fsdp": ("multi_gpu", None),
    "deepspeed_zero2": ("use_deepspeed", 2),
    "deepspeed_zero3": ("use_deepspeed", 3),
}


def parsed(*arguments):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    parser = launch_command_parser()
    return _validate_launch_command(parser.parse_args([*arguments, "script.py"]))[0]


def test_every_mode_has_its_file():
    assert {file.stem for file in FILES} == set(MODES)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_one_machine(file):
    flag, stage = MODES[file.stem]
    found = parsed("--config_file", str(file), "--num_processes", "4")
    assert getattr(found, flag) and not found.use_fsdp and not found.cpu
    assert (found.num_machines, found.num_processes, found.mixed_precision) == (1, 4, "no")
    assert getattr(found, "zero_stage", None) == stage


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_several_machines(file):
    options = "--num_machines 2 --machine_rank 1 --num_processes 16 --main_process_ip node1"
    found = parsed("--config_file", str(file), *options.split(), "--main_process_port", "29500")
    assert getattr(found, MODES[file.stem][0])
    assert (found.num_machines, found.machine_rank, found.num_processes) == (2, 1, 16)
    assert (found.main_process_ip, found.main_process_port) == ("node1", 29500)


# ---- SLURM


STUBS = {
    "scontrol": '[ "$1" = show ] && printf "node1\\nnode2\\n" || echo "scontrol $*" >> "$LOG"',
    "srun": 'while [[ "$1" == --* ]]; do shift; done; SLURM_NODEID=1 exec "$@"',
    "accelerate": 'printf "<%s>" "$@" >> "$LOG"; echo >> "$LOG"; $WORK; exit "${CODE:-0}"',
    "scancel": 'echo "scancel $*" >> "$LOG"; touch "$LOG.stop"',
}


@pytest.fixture
def cluster(tmp_path):
    """A cluster of two nodes with four GPUs each; its commands write down what they are asked."""
    for name, body in STUBS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "LOG": str(tmp_path / "log"),
        "WORK": "true",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_GPUS_ON_NODE": "4",
    }

    def submit(*arguments, **more):
        command = ["bash", str(ROOT / "scripts/train_slurm.sh"), *arguments]
        return subprocess.Popen(
            command, cwd=ROOT, env={**environment, **more}, stderr=subprocess.PIPE, text=True
        )

    return submit, tmp_path / "log"


def test_the_slurm_example_starts_a_launcher_on_every_node(cluster):
    submit, log = cluster
    job = submit("fsdp", "scripts/train_stage2.py", "--config", "a b.yaml", "train.parallel=fsdp")
    assert job.wait(30) == 0, job.stderr.read()
    (line,) = log.read_text().splitlines()
    file = "<launch><--config_file><configs/accelerate/fsdp.yaml>"
    machines = "<--num_machines><2><--machine_rank><1><--num_processes><8>"
    assert line.startswith(f"{file}{machines}<--main_process_ip><node1>")
    assert line.endswith("<scripts/train_stage2.py><--config><a b.yaml><train.parallel=fsdp>")


def test_a_failed_slurm_job_fails(cluster):
    submit, log = cluster
    assert submit("ddp", "script.py", CODE="3").wait(30) == 3
    assert "requeue" not in log.read_text()


def test_a_slurm_job_whose_time_is_up_lets_the_run_save_and_is_queued_again(cluster):
    submit, log = cluster
    wait = log.parent / "wait"
    wait.write_text('#!/usr/bin/env bash\nwhile [ ! -e "$LOG.stop" ]; do sleep 0.1; done\n')
    wait.chmod(0o755)
    job = submit("ddp", "script.py", WORK=str(wait))
    while not log.is_file():
        assert job.poll() is None
    job.send_signal(10)  # SIGUSR1, ten minutes before the end
    assert job.wait(30) == 0, job.stderr.read()
    assert log.read_text().splitlines()[1:] == ["scancel --signal=TERM 7", "scontrol requeue 7"]


def test_the_slurm_example_says_how_it_is_used(cluster):
    submit, _ = cluster
    job = submit("ddpp", "script.py")
    assert job.wait(30) == 2 and "usage: sbatch" in job.stderr.read()
