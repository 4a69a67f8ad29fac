"""The example for several clouds: sky's part is a stand-in, which makes no machines; diloco's part is real."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

EXAMPLE = Path(__file__).parent.parent / "examples" / "skypilot"
SKY = """#!/bin/sh
echo "$@" >>calls
case "$*" in "status --ip diloco-"*) echo "192.0.2.${3#diloco-}" ;; esac
"""


def test_islands_in_several_clouds_are_started_by_ssh_at_the_addresses_that_sky_gives(tmp_path):
    folder = shutil.copytree(EXAMPLE, tmp_path / "skypilot")
    (tmp_path / "bin").mkdir()
    dry = f'#!/bin/sh\nexec {sys.executable} -m diloco "$@" --dry-run\n'
    for name, text in (("sky", SKY), ("diloco", dry)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    command = ["bash", folder / "islands.sh", "aws/us-east-1", "gcp/europe-west4"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (folder / "hosts").read_text() == "diloco-0 address=192.0.2.0\ndiloco-1 address=192.0.2.1\n"
    calls = sorted((folder / "calls").read_text().splitlines())
    assert calls[0] == "launch --yes --cluster diloco-0 --infra aws/us-east-1 island.yaml"
    assert "---- island-0.sh" in done.stdout and "---- island-1.sh" in done.stdout
    assert "diloco-venv/bin/diloco run" in done.stdout


def test_the_machines_open_the_ports_that_islands_listen_at():
    ports = yaml.safe_load((EXAMPLE / "island.yaml").read_text())["resources"]["ports"]
    assert ports.split("-")[0] == "31337"
