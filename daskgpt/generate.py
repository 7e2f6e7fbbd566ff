"""Write text with a trained model: `python -m daskgpt.generate RUN_FOLDER`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from tiktoken import Encoding

from daskgpt.config.flags import Parser, add_flags, from_flags, run_command
from daskgpt.config.settings import Checked, documented, setting
from daskgpt.data.tokenizer import encode, get_encoding
from daskgpt.generation.choosing import Choice
from daskgpt.generation.decoder import Weights
from daskgpt.generation.ending import end_of_text, shown
from daskgpt.generation.readable import readable
from daskgpt.generation.sampling import PRECISIONS, Rate, Texts, check_prompt
from daskgpt.schedulers.copy_rate import copy_rate
from daskgpt.training.job import compile_kernels
from daskgpt.training.run_folder import read_model_of, trained_with

DESCRIPTION = """\
Write text with a trained model.

Keys and values of the tokens so far are kept, so that a token reads every weight once. A text that outgrows the
model's context is read again from its newer half. The last line, on standard error, says how fast tokens came, how many
bytes of weights, keys and values were read for that, and which share this is of the rate at which the same threads
copy memory (bytes read and written): more than 100 % where the model stays in the processor's caches.

-i chats: what is typed is a line of the text, which the model goes on with until end of text, --until, or --tokens.
An empty line lets it go on. Ctrl-C ends what it says, Ctrl-D the chat. A line of text is not a question to a model that
has never seen one answered: --until "\\n" has it write a line.
"""


@documented
@dataclass(frozen=True)
class GenerateConfig(Checked):
    """What to write."""

    samples: int = setting(1, "texts after each prompt", least=1, most=2**12)
    tokens: int = setting(200, "length of the text", unit="tokens", least=0, most=2**30)
    temperature: float = setting(0.8, "0 takes the likeliest token, 1 the model's own probabilities", least=0)
    top_k: int = setting(0, "choose among so many likeliest tokens, 0 = all", least=0)
    top_p: float = setting(1.0, "choose among the fewest likeliest tokens with so much probability, 1 = all", least=0)
    seed: int = setting(0, "seed of the choices", least=0)
    until: str = setting("", "end a text at these words")
    end: str = setting("stop", "what end-of-text does to a text", choices=("stop", "ignore"))
    encoding: str = setting("", "bytes, gpt2, or the file of a learned vocabulary; empty = the model's own")
    precision: str = setting("float32", "of weights, keys and values", choices=PRECISIONS)
    threads: int = setting(0, "that share out the rows of each matrix; 0 = the cores, or fewer", least=0, most=2**12)

    def __post_init__(self) -> None:
        super().__post_init__()
        Choice(self.temperature, self.top_k, self.top_p)


@dataclass
class Writer:
    """A model and how it is to write."""

    options: GenerateConfig
    weights: Weights
    encoding: Encoding
    context: int
    choice: Choice = field(init=False)
    end: int | None = field(init=False)

    def __post_init__(self) -> None:
        options = self.options
        self.choice = Choice(options.temperature, options.top_k, options.top_p)
        self.end = end_of_text(self.encoding) if options.end == "stop" else None

    def texts(self, prompts: list[list[int]], longest: int = 0) -> Texts:
        return Texts(self.weights, prompts, self.context, longest, self.options.threads)

    def write(self, texts: Texts) -> Iterator[list[int | None]]:
        return texts.write(self.options.tokens, self.choice, self.options.seed, self.end)

    def shown(self, tokens: Iterator[int | None]) -> Iterator[str]:
        """The text of tokens, as they come."""
        return readable(self.encoding, shown(self.encoding, tokens, self.end, self.options.until))


def main(arguments: list[str]) -> int:
    """Print the prompt and what follows it, a token at a time."""
    flags = Parser(prog="daskgpt.generate", description=DESCRIPTION)
    flags.add_argument("model", metavar="MODEL", help="run folder, or a model in any file that daskgpt.convert reads")
    flags.add_argument(
        "--prompt", action="append", help="text to go on from (default: a new line); several are several texts"
    )
    flags.add_argument("-i", "--interactive", action="store_true", help="chat with the model in the terminal")
    add_flags(flags, GenerateConfig)
    values = flags.parse_args(arguments)
    options: GenerateConfig = from_flags(GenerateConfig, values)
    model = read_model_of(values.model)
    encoding_name, context = trained_with(values.model, model, options.encoding)
    encoding = get_encoding(encoding_name)
    prompts = values.prompt or ["\n"]
    for prompt in prompts:
        check_prompt(model.config, encode(encoding, prompt).tolist())
    compile_kernels()
    writer = Writer(options, Weights(model.config, model.parameters, options.precision), encoding, context)
    texts = (
        chat(writer)
        if values.interactive
        else write_all(writer, [each for each in prompts for _ in range(options.samples)])
    )
    if texts is not None and texts.rate.tokens:
        print(told(texts.rate, texts.decoder.threads, options.precision), file=sys.stderr)
    return 0


def write_all(writer: Writer, prompts: list[str]) -> Texts:
    """Print each prompt and what follows: of the first one as it comes, of the others when all are written."""
    ids = [encode(writer.encoding, prompt).tolist() for prompt in prompts]
    texts = writer.texts(ids, max(map(len, ids)) + writer.options.tokens)
    found: list[list[int | None]] = [[] for _ in ids]

    def first() -> Iterator[int | None]:
        """The first text's tokens, all that are shown of them; the others' are put aside."""
        for tokens in writer.write(texts):
            for own, token in zip(found, tokens, strict=True):
                own.append(token)
            yield tokens[0]

    coming = first()
    for number, prompt in enumerate(prompts):
        if len(prompts) > 1:
            print(f"--- {number + 1} of {len(prompts)}")
        print(prompt, end="", flush=True)
        for text in writer.shown(iter(found[number]) if number else coming):
            print(text, end="", flush=True)
        if number == 0 and len(prompts) > 1:
            for _ in coming:  # the others may be longer than the first one
                pass
        print(flush=True)
    return texts


def chat(writer: Writer) -> Texts | None:
    """Let a person and the model write in turns; the text, None where nobody said anything."""
    with suppress(ImportError):
        import readline  # noqa: F401  # lines can be edited and come back
    texts: Texts | None = None
    asks = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(asks)
        except EOFError:
            print()
            return texts
        said = encode(writer.encoding, line + "\n").tolist() if line or texts is None else []
        if texts is None:
            texts = writer.texts([said])
        else:
            texts.tokens[0] += said
        try:
            for text in writer.shown(tokens[0] for tokens in writer.write(texts)):
                print(text, end="", flush=True)
        except KeyboardInterrupt:
            pass  # ends the answer, not the chat
        print(flush=True)


def told(rate: Rate, threads: int, precision: str) -> str:
    """How fast tokens came, for a person."""
    copied = copy_rate(threads)
    read, per = rate.read / rate.seconds, "1 thread" if threads == 1 else f"{threads} threads"
    return (
        f"{rate.tokens / rate.seconds:,.1f} tokens/s ({rate.tokens:,} in {rate.seconds:.1f} s; {precision}, {per}); "
        f"{read / 1e9:.1f} GB/s read, {read / copied:.0%} of a copy's {copied / 1e9:.1f}"
    )


if __name__ == "__main__":
    run_command(main)
