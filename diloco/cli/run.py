from pathlib import Path

from rich.console import Console

from diloco.configfile import load_config
from diloco.runner import run
from diloco.trainer import Outcome


def run_command(path: Path, overrides: list[str], *, resume: bool, fresh: bool) -> None:
    config = load_config(path, overrides)
    outcome = run(config, resume=resume, fresh=fresh)
    if outcome.leader:
        changes = "".join(f" --set {override}" for override in overrides)
        Console(highlight=False).print(
            farewell(outcome, config.dir, f"diloco run {path}{changes}"), soft_wrap=True, markup=False
        )


def farewell(outcome: Outcome, folder: str, command: str) -> str:
    if not outcome.finished:
        return f"stopped after step {outcome.step}; go on with:\n  {command} --resume"
    losses = outcome.validation_losses
    found = f", validation loss {losses[0]:.3f} -> {losses[-1]:.3f}" if losses else ""
    return "\n".join(
        [
            f"done: {outcome.step} steps, {outcome.round} rounds{found}",
            "next:",
            f"  {command} --fresh --set inner.steps={2 * outcome.step}    train longer",
            "  diloco config                                     every setting, with its meaning",
            f"  {folder}/events.jsonl    what happened, one JSON object a line",
        ]
    )
