"""Generate text with a trained model.

Keys and values of the tokens so far are cached, so a new token reads every weight once. When a text outgrows the
model's context, the model rereads the newer half. The last line, on standard error, reports the rate of tokens, but
for those that come with a prompt or with what is reread.

-i chats: a typed line is added to the text, and the model continues the text until end-of-text, --until, or --tokens.
An empty line lets it continue. Ctrl-C ends its reply, Ctrl-D the chat. A model that was not trained on questions and
answers does not answer, but continues the text; with --until "\\n" it writes one line.

A model with a chat template in its tokenizer's files answers: --prompt is what the user says, and so is each line of
-i, where the model reads the conversation so far. An empty line after a complete answer is an empty message.
--template "{}" makes it continue texts.

For a model that was trained on pairs, --template gives the form of its prompts, such as "Question: {}\\nAnswer:". Each
typed line becomes a prompt of that form then, and begins a new text, as in training, and so does --prompt.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from daskgpt.config.errors import number_of, require
from daskgpt.config.flags import Parser, run_command, text
from daskgpt.config.settings import setting
from daskgpt.data.pairs import ASSISTANT, USER, ChatTemplate, Message, template_of
from daskgpt.formats.encoding import Encoding
from daskgpt.generation.decoder import Weights
from daskgpt.generation.sampler import Choice, DecodingConfig, Texts, prompt_ids, readable, shown
from daskgpt.training.job import compile_kernels

PLACE = "{}"  # of what a user writes, in the form of prompts


class GenerateConfig(DecodingConfig, Choice):
    """Settings of generation."""

    temperature: float = setting(0.8, "0 = always the likeliest token, 1 = the model's own probabilities", most=1e30)
    samples: int = setting(1, "texts after each prompt", least=1, most=2**12)
    tokens: int = setting(200, "length of the text", unit="tokens", most=2**30)
    seed: int = setting(0, "seed of the random choices")
    until: str = setting("", "end a text at these words; \\n is a line break", blank=True)
    template: str = setting(
        "",
        "form of prompts, in which {} is the place of --prompt or of a line of -i; \\n is a line break; empty = the "
        "model's chat template, if it has one",
        blank=True,
    )
    system: str = setting("", "what a model with a chat template is told before a conversation", blank=True)


@dataclass
class Writer:
    """A model with the settings for its text."""

    options: GenerateConfig
    weights: Weights
    encoding: Encoding
    context: int
    template: ChatTemplate | None = None

    def ids(self, text: str) -> list[int]:
        """Return a text as tokens. Errors   ValueError if it is empty, or a token is not in the model's vocabulary"""
        return prompt_ids(self.weights.config, self.encoding.encode(text, "prompt"))

    def texts(self, prompts: list[list[int]], longest: int = 0) -> Texts:
        return Texts(self.weights, prompts, self.context, longest, self.options.threads)

    def asking(self, messages: list[Message]) -> str:
        """Return a conversation as text, up to where the model's answer begins."""
        assert self.template is not None
        told = [Message("system", self.options.system)] if self.options.system else []
        return self.template.text([*told, *messages], reply=True)

    def write(self, texts: Texts) -> Iterator[list[int | None]]:
        return texts.write(self.options.tokens, self.options, self.options.seed, self.encoding.eot_token)

    def print(self, tokens: Iterable[int | None]) -> None:
        """Print the text of tokens as they arrive."""
        wanted = shown(self.encoding, tokens, self.encoding.eot_token, unescaped(self.options.until))
        for part in readable(self.encoding, wanted):
            print(part, end="", flush=True)


def main(arguments: list[str]) -> int:
    """Print the prompt and its continuation, a token at a time."""
    flags = Parser(prog="daskgpt.generate", description=__doc__)
    flags.add_argument("model", metavar="MODEL", help="run folder, or a model in any file that daskgpt.convert reads")
    help_text = "text to continue, or what a user says to a chat model (default: a new line); may be repeated"
    flags.add_argument("--prompt", action="append", type=text, help=help_text)
    flags.add_argument("-i", "--interactive", action="store_true", help="chat with the model in the terminal")
    values, options = flags.read(arguments, GenerateConfig)
    rule = "-i takes one prompt after the other from the terminal"
    got = {"prompt": values.prompt, "samples": options.samples}
    alone = not values.prompt and options.samples == 1
    require(alone or not values.interactive, "generate", rule, got, "Leave out --prompt and --samples.")
    model, encoding, context = options.opened(values.model)
    weights = Weights(model.config, model.parameters, options.precision)
    template = None if options.template else template_of(encoding)
    rule, got = "without a chat template, a model is told nothing before a text", {"system": options.system}
    require(template is not None or not options.system, "generate", rule, got, "Put it into --prompt.")
    # A chat model knows longer texts than those that it was tuned on.
    writer = Writer(options, weights, encoding, weights.config.positions if template else context, template)
    form = unescaped(options.template) or PLACE
    rule, got = f"a template must have one {PLACE}", {"template": form}
    require(form.count(PLACE) == 1, "generate", rule, got, "It stands for what you write.")
    if template:
        given = [(f"{text}\n", writer.asking([Message(USER, text)])) for text in values.prompt or [""]]
    else:
        given = [(form.replace(PLACE, text),) * 2 for text in values.prompt or ["\n" if form == PLACE else ""]]
    prompts = [(shown, writer.ids(text)) for shown, text in given for _ in range(options.samples)]
    compile_kernels(uses=weights.config.uses | {"decoding"})
    texts = chat(writer, form) if values.interactive else write_all(writer, prompts)
    if texts is not None and texts.rate.tokens:
        rate, per = texts.rate, f"{options.precision}, {number_of(texts.decoder.threads, 'thread')}"
        seconds = f"{rate.seconds:.1f} s" if rate.seconds >= 1 else f"{1e3 * rate.seconds:.1f} ms"
        took = f"({rate.tokens:,} in {seconds}; {per})"
        print(f"{rate.tokens / rate.seconds:,.1f} tokens/s {took}", file=sys.stderr)
    return 0


def unescaped(text: str) -> str:
    """Return the text of a flag with line breaks in place of \\n: few shells have a simple way to type them."""
    return text.replace("\\n", "\n")


def write_all(writer: Writer, prompts: list[tuple[str, list[int]]]) -> Texts:
    """Print each prompt and its continuation: of a single one as it is generated, of several when all are complete."""
    texts = writer.texts([ids for _, ids in prompts], max(len(ids) for _, ids in prompts) + writer.options.tokens)
    written = writer.write(texts)
    rows = written if len(prompts) == 1 else list(written)
    for number, (prompt, _) in enumerate(prompts):
        if len(prompts) > 1:
            print(f"--- {number + 1} of {len(prompts)}")
        print(prompt, end="", flush=True)
        writer.print(tokens[number] for tokens in rows)
        print(flush=True)
    return texts


def chat(writer: Writer, form: str) -> Texts | None:
    """Let the user and the model write in turns; return the last text, None if nothing was typed.

    form   of a prompt; with {} alone, without a chat template, all lines and replies are one text
    """
    messages: list[Message] = []
    with suppress(ImportError):
        import readline  # noqa: F401  # for editing and recalling lines
    texts: Texts | None = None
    length = 0  # number of tokens before a reply to a message
    ends = {writer.encoding.eot_token, writer.encoding.specials.get(writer.options.until)}  # of replies
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            print()
            return texts
        if line or texts is None or (writer.template and not ends.isdisjoint(texts.tokens[0][length:])):
            if writer.template:
                messages.append(Message(USER, line))
                ids = writer.ids(writer.asking(messages))
            elif form != PLACE:
                ids = writer.ids(form.replace(PLACE, line))
            else:
                ids = (texts.tokens[0] if texts else []) + writer.ids(line + "\n")
            texts, length = continued(writer, texts, ids), len(ids)
        elif messages:  # its reply goes on
            messages.pop()
        with suppress(KeyboardInterrupt):  # ends the reply, not the chat
            writer.print(tokens[0] for tokens in writer.write(texts))
        print(flush=True)
        if writer.template:
            reply = [token for token in texts.tokens[0][length:] if token not in ends]
            messages.append(Message(ASSISTANT, writer.encoding.decode(reply)))


def continued(writer: Writer, texts: Texts | None, ids: list[int]) -> Texts:
    """Return a text of these tokens; the same one, with its cache, if they continue its own."""
    if texts and ids[: len(texts.tokens[0])] == texts.tokens[0]:
        texts.tokens[0][:] = ids
        return texts
    new = writer.texts([ids])
    if texts:
        new.rate, new.random = texts.rate, texts.random
    return new


if __name__ == "__main__":
    run_command(main)
