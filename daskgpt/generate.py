"""Generate text with a trained model.

Keys and values of the tokens so far are cached, so that a token reads every weight once. When a text outgrows the
model's context, its newer half is read again. The last line, on standard error, reports the rate of tokens and the rate
at which weights, keys and values were read, also as a share of the rate at which the same threads copy memory (bytes
read and written). The share exceeds 100 % if the model stays in the processor's caches.

-i chats: a typed line is added to the text, and the model continues the text until end-of-text, --until, or --tokens.
An empty line lets it continue. Ctrl-C ends its reply, Ctrl-D the chat. A model that was not trained on questions and
answers does not answer, but continues the text; with --until "\\n" it writes one line.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from tiktoken import Encoding

from daskgpt.config.flags import Parser, add_flags, from_flags, run_command
from daskgpt.config.settings import Checked, documented, setting
from daskgpt.data.tokenizer import encode, get_encoding
from daskgpt.generation.decoder import Weights
from daskgpt.generation.sampler import PRECISIONS, Choice, Rate, Texts, check_prompt
from daskgpt.generation.sanitize import end_of_text, readable, shown
from daskgpt.schedulers.machine import copy_rate
from daskgpt.training.checkpoint import encoding_and_length, open_model_of
from daskgpt.training.job import compile_kernels


@documented
@dataclass(frozen=True)
class GenerateConfig(Checked):
    """Settings of generation."""

    samples: int = setting(1, "texts after each prompt", least=1, most=2**12)
    tokens: int = setting(200, "length of the text", unit="tokens", least=0, most=2**30)
    temperature: float = setting(0.8, "0 = always the likeliest token, 1 = the model's own probabilities", least=0)
    top_k: int = setting(0, "choose among this many likeliest tokens; 0 = all", least=0)
    top_p: float = setting(
        1.0, "choose among the fewest likeliest tokens with at least this much probability; 1 = all", least=0
    )
    seed: int = setting(0, "seed of the random choices", least=0)
    until: str = setting("", "end a text at these words")
    end: str = setting("stop", "whether end-of-text ends a text", choices=("stop", "ignore"))
    encoding: str = setting("", "bytes, gpt2, or the file of a learned vocabulary; empty = the model's own")
    precision: str = setting("float32", "precision of weights, keys and values", choices=PRECISIONS)
    threads: int = setting(
        0, "threads that share the rows of each matrix; 0 = all cores, or fewer for a small model", least=0, most=2**12
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.choice

    @property
    def choice(self) -> Choice:
        """Errors   ValueError for numbers out of their bounds"""
        return Choice(self.temperature, self.top_k, self.top_p)


@dataclass
class Writer:
    """A model with the settings for its text."""

    options: GenerateConfig
    weights: Weights
    encoding: Encoding
    context: int

    def __post_init__(self) -> None:
        self.end = end_of_text(self.encoding) if self.options.end == "stop" else None

    def ids(self, text: str) -> list[int]:
        found: list[int] = encode(self.encoding, text).tolist()
        return found

    def texts(self, prompts: list[list[int]], longest: int = 0) -> Texts:
        return Texts(self.weights, prompts, self.context, longest, self.options.threads)

    def write(self, texts: Texts) -> Iterator[list[int | None]]:
        return texts.write(self.options.tokens, self.options.choice, self.options.seed, self.end)

    def print(self, tokens: Iterator[int | None]) -> None:
        """Print the text of tokens as they arrive."""
        for text in readable(self.encoding, shown(self.encoding, tokens, self.end, self.options.until)):
            print(text, end="", flush=True)


def main(arguments: list[str]) -> int:
    """Print the prompt and its continuation, a token at a time."""
    flags = Parser(prog="daskgpt.generate", description=__doc__)
    flags.add_argument("model", metavar="MODEL", help="run folder, or a model in any file that daskgpt.convert reads")
    help_text = "text to continue (default: a new line); repeat it for several texts"
    flags.add_argument("--prompt", action="append", help=help_text)
    flags.add_argument("-i", "--interactive", action="store_true", help="chat with the model in the terminal")
    add_flags(flags, GenerateConfig)
    values = flags.parse_args(arguments)
    options: GenerateConfig = from_flags(GenerateConfig, values)
    model = open_model_of(values.model)
    encoding_name, context = encoding_and_length(model, options.encoding)
    encoding = get_encoding(encoding_name)
    prompts = values.prompt or ["\n"]
    for prompt in prompts:
        check_prompt(model.config, encode(encoding, prompt).tolist())
    compile_kernels(uses={"decoding", model.config.norm})
    weights = Weights(model.config, model.loaded().parameters, options.precision)
    writer = Writer(options, weights, encoding, context)
    texts = chat(writer) if values.interactive else write_all(writer, prompts)
    if texts is not None and texts.rate.tokens:
        print(describe_rate(texts.rate, texts.decoder.threads, options.precision), file=sys.stderr)
    return 0


def write_all(writer: Writer, prompts: list[str]) -> Texts:
    """Print each prompt and its continuation: the first as it is generated, the others when all are complete."""
    prompts = [prompt for prompt in prompts for _ in range(writer.options.samples)]
    ids = [writer.ids(prompt) for prompt in prompts]
    texts = writer.texts(ids, max(map(len, ids)) + writer.options.tokens)
    found: list[list[int | None]] = [[] for _ in ids]

    def first() -> Iterator[int | None]:
        """Yield the first text's tokens; collect those of the others."""
        for tokens in writer.write(texts):
            for own, token in zip(found, tokens, strict=True):
                own.append(token)
            yield tokens[0]

    coming = first()
    for number, prompt in enumerate(prompts):
        if len(prompts) > 1:
            print(f"--- {number + 1} of {len(prompts)}")
        print(prompt, end="", flush=True)
        writer.print(iter(found[number]) if number else coming)
        if number == 0 and len(prompts) > 1:
            list(coming)  # the others may be longer than the first one
        print(flush=True)
    return texts


def chat(writer: Writer) -> Texts | None:
    """Let the user and the model write in turns; return the text, None if nothing was typed."""
    with suppress(ImportError):
        import readline  # noqa: F401  # for editing and recalling lines
    texts: Texts | None = None
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            print()
            return texts
        if texts is None:
            texts = writer.texts([writer.ids(line + "\n")])
        elif line:
            texts.tokens[0] += writer.ids(line + "\n")
        with suppress(KeyboardInterrupt):  # ends the reply, not the chat
            writer.print(tokens[0] for tokens in writer.write(texts))
        print(flush=True)


def describe_rate(rate: Rate, threads: int, precision: str) -> str:
    """Return a line on the rate of tokens."""
    copied, read = copy_rate(threads), rate.read / rate.seconds
    per = f"{threads} thread{'s' * (threads != 1)}"
    return (
        f"{rate.tokens / rate.seconds:,.1f} tokens/s ({rate.tokens:,} in {rate.seconds:.1f} s; {precision}, {per}); "
        f"{read / 1e9:.1f} GB/s read, {read / copied:.0%} of a copy's {copied / 1e9:.1f}"
    )


if __name__ == "__main__":
    run_command(main)
