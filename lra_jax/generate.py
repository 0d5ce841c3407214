"""Continues a text: ``python -m lra_jax.generate --workdir=runs/... --prompt="def "``.

The run must be a finished one of ``--task=lm``; its data are not needed.
"""

if __name__ == "__main__":
    from lra_jax import signals

    signals.watch()

import codecs
import dataclasses
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from lra_jax import cli, progress, runtime, signals
from lra_jax.errors import InputError, a_thing, expected, reason, rename
from lra_jax.files import expand_home, read_bytes


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
    """The model, the prompts, and the sampling settings."""

    workdir: str
    """Run directory, or a file NAME.safetensors of `evaluate --save`."""
    prompt: str = ""
    """The text to continue; by default a new document."""
    prompts: str | None = None
    """A file with one prompt per line; all are continued together."""
    tokens: int = 256
    """Number of tokens to generate; a text can end earlier."""
    temperature: float = 0.8
    """Number that divides the logits; 0 always takes the most probable token."""
    top_k: int | None = None
    """Sample only from this many of the most probable tokens."""
    top_p: float | None = None
    """Sample only from the most probable tokens that together have this probability."""
    seed: int = 0
    """Seed for sampling."""
    allow_code: bool = False
    """Import and call your own code that the run names. Use this only for a directory
    that you trust."""


_FLAGS = {"num_tokens": "tokens", "prompts": "prompt"}
_FLAGS |= dict.fromkeys(("layer", "model"), "workdir")
_FLAGS_OF_LOADING = {"run": "workdir", "file": "workdir", "allow_code": "allow-code"}


def main(args: Sequence[str] | None = None) -> None:
    """The command line."""
    args = cli.begin(args)
    prog = "python -m lra_jax.generate"
    config = cli.parse(GenerateConfig, prog, "Continues a text.", args)
    with cli.user_errors():
        progress.note(f"loading {config.workdir} ...")
        runtime.configure_jax()
        texts = _read_prompts(config)
        pieces = run(config, texts)
        if len(texts) == 1:
            print(texts[0], end="", flush=True)
            for (piece,) in pieces:
                print(piece, end="", flush=True)
            print()
            return
        for text, *parts in zip(texts, *pieces, strict=True):
            print(f"{text}{''.join(parts)}")


def run(config: GenerateConfig, texts: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Continues texts: yields the next piece of each, as soon as it is known.

    Raises:
      ValueError: it is not a finished language model, or a setting does not fit.
    """
    from lra_jax.models import CausalLM, load
    from lra_jax.models.generation import tokens_in_turn
    from lra_jax.vocabularies import Words, from_raw

    try:
        saved = load(config.workdir, allow_code=config.allow_code)
    except InputError as error:
        flag = _FLAGS_OF_LOADING.get(error.name)
        if flag is None:
            raise
        raise rename(error, f"--{flag}") from error
    if not isinstance(saved.model, CausalLM):
        got = a_thing(saved.model)
        raise expected("--workdir", "a run of --task=lm", got)
    vocabulary = from_raw(saved.raw)
    end = _end(vocabulary)
    prompts = [_encode(vocabulary, text) for text in texts]
    try:
        steps = tokens_in_turn(
            saved.model,
            prompts,
            config.tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            seed=config.seed,
            end=end,
        )
        # Any error appears in the first step.
        steps = itertools.chain([next(steps)], steps)
    except InputError as error:
        name = _FLAGS.get(error.name, error.name)
        raise rename(error, f"--{name}") from error
    pieces = _decode(vocabulary, steps, len(texts), end)
    if isinstance(vocabulary, Words):  # Each is followed by a blank.
        blanks = (" " if text and not text[-1].isspace() else "" for text in texts)
        pieces = itertools.chain([tuple(blanks)], pieces)
    return pieces


def _end(vocabulary: Any) -> int | None:
    """The token that ends a text; None for words, where every line has one."""
    from lra_jax.vocabularies import Words

    return None if isinstance(vocabulary, Words) else vocabulary.end


def _encode(vocabulary: Any, text: str) -> Any:
    """A text, encoded as the beginning of a document."""
    import numpy as np

    from lra_jax.vocabularies import Words

    # Words leave out the last line end of a document, which a prompt has not reached.
    more = "\n" if isinstance(vocabulary, Words) else ""
    try:
        tokens = vocabulary.encode(f"{text}{more}".encode())
    except ValueError as error:
        raise rename(error, "--prompt") from error
    unknown = vocabulary.missing(text.encode()) if more else []
    if unknown:
        words = ", ".join(map(repr, dict.fromkeys(unknown)))
        line = f"warning: --prompt: {words} not in the vocabulary, read as unknown"
        print(line, file=sys.stderr)
    return np.concatenate([np.array([vocabulary.end], np.int32), tokens])


def _decode(
    vocabulary: Any, steps: Any, count: int, end: int | None
) -> Iterator[tuple[str, ...]]:
    """Yields whole characters, whose bytes may arrive one by one; nothing after the end
    of a text, while others go on."""
    make = codecs.getincrementaldecoder("utf-8")
    decoders = [make(errors="replace") for _ in range(count)]
    ended = [False] * count
    for drawn in steps:
        ended = [a or b == end for a, b in zip(ended, drawn, strict=True)]
        yield tuple(
            "" if done else decoder.decode(vocabulary.decode(token[None]))
            for done, decoder, token in zip(ended, decoders, drawn, strict=True)
        )
    yield tuple(decoder.decode(b"", final=True) for decoder in decoders)


def _read_prompts(config: GenerateConfig) -> list[str]:
    if config.prompts is None:
        return [config.prompt]
    if config.prompt:
        raise expected("--prompt", "nothing with --prompts", f"{config.prompt!r}")
    file = expand_home(config.prompts, "--prompts")
    try:
        # Some editors put a mark at the start.
        text = read_bytes(file).decode("utf-8-sig").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        got = f"{file}: {reason(error)}"
        raise expected("--prompts", "a file of UTF-8 text", got) from error
    if not text:
        raise expected("--prompts", "a prompt on each line", f"{file}, which is empty")
    # Not by splitlines, which ends a line at form feeds and the like, too.
    return text.removesuffix("\n").split("\n")


if __name__ == "__main__":
    cli.run(main)
