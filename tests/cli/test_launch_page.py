"""The files and commands of docs/launch.md: well formed, and with options that torchrun has."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

PAGE = (Path(__file__).parents[2] / "docs" / "launch.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SHELL = [text for kind, text in BLOCKS if kind == "sh"]
COMMANDS = [
    line.partition("torchrun ")[2]
    for text in SHELL
    for line in text.replace("\\\n", " ").splitlines()
    if "torchrun " in line
]
INLINE = re.findall(r"`torchrun (.+?)`", PAGE)
JOB, TRAIN_JOB = [list(yaml.safe_load_all(text)) for kind, text in BLOCKS if kind == "yaml"]


@pytest.mark.parametrize("text", SHELL, ids=lambda text: text.split("\n")[0])
def test_the_shell_takes_every_block(text):
    subprocess.run(["bash", "-n"], check=True, input=text, text=True)


@pytest.mark.parametrize("command", [*COMMANDS, *INLINE])
def test_torchrun_takes_every_command(command):
    assert get_args_parser().parse_args(shlex.split(command)).training_script == "train.py"


def test_the_job_and_its_service_name_each_other():
    service, job = JOB
    pods = job["spec"]["template"]["spec"]
    (container,) = pods["containers"]
    options = get_args_parser().parse_args(container["args"])
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pods["subdomain"] == service["metadata"]["name"]
    assert options.rdzv_endpoint == f"{job['metadata']['name']}-0.{pods['subdomain']}:29500"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(options.nnodes)


def test_the_train_job_gives_torchrun_a_script():
    (job,) = TRAIN_JOB
    program, script = job["spec"]["trainer"]["command"]
    assert (program, get_args_parser().parse_args([script]).training_script) == ("torchrun", "train.py")
