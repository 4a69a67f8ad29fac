"""`diloco sample`."""

import io
import os
import sys
from itertools import islice
from math import isfinite
from typing import Annotated

import typer

from diloco.cli.shared import Device, RunName, RunTokenizer
from diloco.errors import ConfigError

# A young model says anything, and a terminal would obey.
HARMLESS = dict.fromkeys({*range(32), *range(127, 160)} - set(map(ord, "\t\n")), "\ufffd")


def sample(
    run: RunName,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="How the text begins.", show_default=False)],
    tokens: Annotated[int, typer.Option(min=1, help="Add at most so many tokens.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="Lower is safer; 0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among so many of the likeliest; 0: all.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Another seed gives another text.")] = 0,
    tokenizer: RunTokenizer = None,
    device: Device = "auto",
) -> None:
    """Continue a text with a run's outer parameters.

    Takes those of the newest save; the run may go on meanwhile. The text ends early where the model ends the document.
    """
    from diloco.history.load import find_run, load_trained, tokenizer_of
    from diloco.history.sample import Choice, continued, encode_prompt, spoken
    from diloco.island.mesh import pick_device

    if not isfinite(temperature):
        raise ConfigError(f"--temperature {temperature}: give a number from 0 (always the likeliest) up")
    where = pick_device(device)
    trained = load_trained(find_run(run))
    for why in trained.passed:
        print(f"note: {why}", file=sys.stderr)
    speech = tokenizer_of(trained, tokenizer)
    prompt = prompt.encode(errors="surrogateescape").decode(errors="replace")  # a shell may pass any bytes
    row = encode_prompt(prompt, speech, trained.config.data)
    if len(row) > trained.context:
        print(
            f"note: of the prompt's {len(row)} tokens the model sees the last {trained.context}, its whole context",
            file=sys.stderr,
        )
    row, choice = row[-trained.context :], Choice(temperature, top_k, seed)
    following = continued(
        trained.module.to(where), row, context=trained.context, vocab=speech.vocab, choice=choice, end=speech.end
    )
    write(prompt)
    for text in spoken(islice(following, tokens), row, speech.decode):
        write(text)
    write("\n")


def write(text: str) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        print(text.translate(HARMLESS) if sys.stdout.isatty() else text, end="", flush=True)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
