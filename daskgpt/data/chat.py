"""Conversations as text: the chat template of a model (Jinja), which its tokenizer's files hold."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from daskgpt.config.errors import refusing, require, short
from daskgpt.formats.encoding import Encoding

WHERE = "chat"
USER, ASSISTANT = "user", "assistant"  # roles
Message = Mapping[str, str]  # role and content
# Rules, with advice; the last one where nothing stands before the assistant's message.
TAKES = "the chat template must take these messages", "Correct their roles and contents."
LEAVES = (
    "the chat template must leave the text of earlier messages as it is",
    "Train on pairs of prompt and response instead.",
)
BEGINS = "a conversation must begin with what the assistant answers", "Begin with a user's message."


class Part(NamedTuple):
    """A part of a conversation's text, and whether the assistant wrote it."""

    text: str
    written: bool


class _Generation(Extension):
    """The tag by which templates mark what the assistant writes; what stands inside of it is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """The form of conversations.

    source   of the template, in Jinja
    names    what it may use besides the messages: bos_token, eos_token

    It is rendered as transformers does, in a sandbox, but for `strftime_now`: with the date in it, a text would have
    other tokens every day.

    Errors   ValueError if it is no template
    """

    def __init__(self, source: str, names: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = _refuse
        self.names = names
        advice = "Correct the tokenizer's files, or give another --template."
        with refusing(None, WHERE, "the chat template must be valid", {"template": short(source)}, advice):
            self.template = environment.from_string(source)

    def text(self, messages: Sequence[Message], reply: bool = False, where: str = WHERE) -> str:
        """Return a conversation as text; with `reply`, up to where the assistant's next message begins.

        where    opens errors

        Errors   ValueError if the template refuses the messages
        """
        (rule, advice), got = TAKES if messages else BEGINS, {"roles": [m.get("role") for m in messages]}
        with refusing(None, where, rule, got, advice):
            text = self.template.render(messages=messages, add_generation_prompt=reply, **self.names)
        return text

    def parts(self, messages: Sequence[Message], where: str = WHERE) -> list[Part]:
        """Return a conversation's text up to the assistant's last message, divided where its messages begin and end.

        Each part that the assistant wrote comes after what it would read in a conversation: the text with `reply`.

        Errors   ValueError if the template refuses the messages, or changes the text of earlier ones
        """
        parts, done = list[Part](), ""
        for number, message in enumerate(messages):
            if message.get("role") != ASSISTANT:
                continue
            before, after = self.text(messages[:number], True, where), self.text(messages[: number + 1], False, where)
            rule, advice = LEAVES if number else BEGINS
            fits = before.startswith(done) and after.startswith(before)
            require(fits, where, rule, {"message": number + 1}, advice)
            parts += [Part(before[len(done) :], False), Part(after[len(before) :], True)]
            done = after
        return parts


def template_of(encoding: Encoding) -> ChatTemplate | None:
    """Return the chat template that an encoding's files have; None if there is none."""
    if not encoding.chat_template:
        return None
    names = {"bos_token": encoding.bos_token, "eos_token": next(iter(encoding.specials))}
    return ChatTemplate(encoding.chat_template, {name: token for name, token in names.items() if token})


def _refuse(message: str) -> None:
    raise TemplateError(message)
