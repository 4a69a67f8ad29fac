import os
import shlex
import sys
from pathlib import Path

from rich.console import Console

from diloco.configfile import load_config
from diloco.runner import run
from diloco.trainer import Outcome


def run_command(path: Path, overrides: list[str], *, resume: bool, fresh: bool) -> None:
    config = load_config(path, overrides)
    outcome = run(config, resume=resume, fresh=fresh)
    if outcome.leader:
        text = farewell(outcome, config.dir, command_line(path, overrides))
        Console(highlight=False).print(text, soft_wrap=True, markup=False)


def command_line(path: Path, overrides: list[str]) -> str:
    """What this run was started with, as it can be typed again."""
    changes = [word for override in overrides for word in ("--set", override)]
    return shlex.join([*_launcher(), "run", str(path), *changes])


def _launcher() -> list[str]:
    if (processes := os.environ.get("LOCAL_WORLD_SIZE")) is not None:
        return ["torchrun", "--nproc-per-node", processes, "-m", "diloco"]
    program = Path(sys.argv[0])
    return [sys.executable, "-m", "diloco"] if program.name == "__main__.py" else [str(program)]


def farewell(outcome: Outcome, folder: str, command: str) -> str:
    longer = f"{command} --resume --set inner.steps={2 * outcome.step}"
    if not outcome.finished:
        return f"stopped after step {outcome.step}; go on with:\n  {command} --resume"
    if not outcome.trained:
        return f"this run is already finished, at step {outcome.step}; train on with:\n  {longer}"
    losses = outcome.validation_losses
    found = f", validation loss {losses[0]:.3f} -> {losses[-1]:.3f}" if len(losses) > 1 else ""
    return "\n".join(
        [
            f"done: {outcome.step} steps, {outcome.round} round{'s' * (outcome.round != 1)}{found}",
            "next:",
            f"  {longer}",
            "      trains on, twice as long (--set changes any key)",
            f"  {shlex.join(_launcher())} config",
            "      explains every key",
            f"  {folder}/events.jsonl",
            "      what happened, one JSON object a line",
        ]
    )
