import io
import os
import sys
from itertools import islice
from math import isfinite

from diloco.errors import ConfigError
from diloco.history.load import begins_with, find_run, load_trained, tokenizer_of
from diloco.history.sample import Choice, continued, encode_prompt, spoken
from diloco.island.mesh import pick_device

# A young model says anything, and a terminal would obey.
HARMLESS = dict.fromkeys({*range(32), *range(127, 160)} - set(map(ord, "\t\n")), "\ufffd")


def sample_command(run: str, prompt: str, *, tokens: int, choice: Choice, tokenizer: str | None, device: str) -> None:
    if not isfinite(choice.temperature):
        raise ConfigError(f"--temperature {choice.temperature}: give a number from 0 (always the likeliest) up")
    where = pick_device(device)
    trained = load_trained(find_run(run))
    for why in trained.passed:
        print(f"note: {why}", file=sys.stderr)
    speech = tokenizer_of(trained, tokenizer)
    prompt = prompt.encode(errors="surrogateescape").decode(errors="replace")  # a shell may pass any bytes
    row = encode_prompt(prompt, speech, begins_with(trained.config, speech))
    if len(row) > trained.context:
        print(
            f"note: of the prompt's {len(row)} tokens the model sees the last {trained.context}, its whole context",
            file=sys.stderr,
        )
    row = row[-trained.context :]
    following = continued(
        trained.module.to(where), row, context=trained.context, vocab=speech.vocab, choice=choice, end=speech.end
    )
    say(prompt)
    for text in spoken(islice(following, tokens), row, speech.decode):
        say(text)
    say("\n")


def say(text: str) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        print(text.translate(HARMLESS) if sys.stdout.isatty() else text, end="", flush=True)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
