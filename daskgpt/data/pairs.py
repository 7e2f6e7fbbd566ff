"""Conversations: pairs of a prompt and its response, chats, the chat template of a model (Jinja), which its tokenizer's
files hold, and the examples that they become.

An example is the tokens of prompt, response and end-of-text, or of a conversation in the form of the model's chat
template. A sequence holds one example, from its first token on, and is filled up with end-of-text; only what the model
is to write counts as targets. So a response is learned in the very context in which the model will write it, and
attention never reads another example.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from daskgpt.config.errors import number_of, refusing, require, short
from daskgpt.config.files import digest_of
from daskgpt.data.source import Source
from daskgpt.data.text import CHATS, LOST, PAIR_FIELDS, SYSTEM, WHERE, of_kind, records, runs, whole
from daskgpt.formats.encoding import Encoding, title_of


class Message(NamedTuple):
    """A message of a conversation, and whether it is learned if the assistant wrote it."""

    role: str
    content: str
    learned: bool = True


Conversation = tuple[Message, ...]
Weighted = tuple[np.ndarray, np.ndarray, np.ndarray]  # tokens, targets, and loss weights of the targets
USER, ASSISTANT = "user", "assistant"  # roles
PAIR = (USER, ASSISTANT)
_UNUSED = {"tools": None, "documents": None}  # what templates may use besides, as transformers has it without them
# Roles by ShareGPT's names.
ROLES = {"human": USER, "gpt": ASSISTANT}
EMPTY = ("", "[]", "{}", "null")  # also as text, where files have one type for all values of a field

# Rules, with advice; the last one where nothing stands before the assistant's message.
TAKES = "the chat template must take these messages", "Correct their roles and contents."
LEAVES = (
    "the chat template must leave the text of earlier messages as it is",
    "Train on pairs of prompt and response instead.",
)
BEGINS = "a conversation must begin with what the assistant answers", "Begin with a user's message."


# Chat templates


class Part(NamedTuple):
    """A part of a conversation's text, and whether the model is to write it."""

    text: str
    learned: bool


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
        with refusing(None, "chat", "the chat template must be valid", {"template": short(source)}, advice):
            self.template = environment.from_string(source)

    def text(self, messages: Sequence[Message], reply: bool = False, where: str = "chat") -> str:
        """Return a conversation as text; with `reply`, up to where the assistant's next message begins.

        where    opens errors

        Errors   ValueError if the template refuses the messages
        """
        (rule, advice), got = TAKES if messages else BEGINS, {"roles": [message.role for message in messages]}
        objects = [{"role": message.role, "content": message.content} for message in messages]
        with refusing(None, where, rule, got, advice):
            text = self.template.render(messages=objects, add_generation_prompt=reply, **_UNUSED, **self.names)
        return text

    def parts(self, messages: Sequence[Message], where: str = "chat") -> list[Part]:
        """Return a conversation's text up to the assistant's last message, divided where its messages begin and end.

        Each part that the assistant wrote comes after what it would read in a conversation: the text with `reply`.

        Errors   ValueError if the template refuses the messages, or changes the text of earlier ones
        """
        parts, done = list[Part](), ""
        for number, message in enumerate(messages):
            if message.role != ASSISTANT:
                continue
            before, after = self.text(messages[:number], True, where), self.text(messages[: number + 1], False, where)
            rule, advice = LEAVES if number else BEGINS
            fits = before.startswith(done) and after.startswith(before)
            require(fits, where, rule, {"message": number + 1}, advice)
            parts += [Part(before[len(done) :], False), Part(after[len(before) :], message.learned)]
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


# Examples


def read_pairs(source: Source) -> tuple[list[Conversation], list[str], list[str]]:
    """Return the conversations of a source's files, their places there, and those of what was left out: conversations
    with an empty text, or nothing of the assistant that is learned.

    A prompt of several fields, such as an instruction and its input, has line breaks between them. What a record's
    field `system` says begins its conversation, once.

    Errors   ValueError naming the first record without such texts, or with a field of LOST that is not empty
    """
    conversations, places, left_out = list[Conversation](), list[str](), list[str]()
    rule = 'a record must have texts: "prompt" and "response", or "messages", each with "role" and "content"'
    for file in source.files:
        for place, conversation in records(_conversation, rule, "Correct it, or take it out.", file):
            learned = any(message.role == ASSISTANT and message.learned for message in conversation)
            fine = learned and all(message.role and message.content for message in conversation)
            conversations += [conversation] * fine
            (places if fine else left_out).append(f"{file.name} {place}")
    return conversations, places, left_out


def _conversation(record: object) -> Conversation:
    fields = _fields(record, "record")
    told = (Message(SYSTEM, text),) if (text := whole(fields.get(SYSTEM), SYSTEM)) else ()
    for asking, answering in PAIR_FIELDS:
        if asking[0] in fields and answering in fields:
            prompt = "\n".join(filter(None, (whole(fields.get(name), name) for name in asking)))
            return *told, Message(USER, prompt), Message(ASSISTANT, whole(fields[answering], answering))
    for field, names in CHATS.items():
        if field in fields:
            messages = [] if fields[field] is None else of_kind(list, fields[field], field)
            said = tuple(_message(message, *names) for message in messages)
            return said if said[:1] == told else (*told, *said)
    raise TypeError(f"a record with the fields {', '.join(fields)}")


def _message(record: object, role: str, content: str) -> Message:
    fields = _fields(record, "message")
    if role not in fields or content not in fields:
        raise TypeError(f"a message with the fields {', '.join(fields)}")
    name, weight = whole(fields[role], role), fields.get("weight")
    if weight not in (None, 0, 1):
        raise TypeError(f"a message with the weight {short(weight)}")
    return Message(ROLES.get(name, name), whole(fields[content], content), weight != 0)


def _fields(record: object, kind: str) -> dict[str, object]:
    """Return the fields of a record or message. Errors   TypeError, also for one of LOST that is not empty"""
    fields: dict[str, object] = of_kind(dict, record, kind)
    for name in LOST:
        if str(fields.get(name) or "") not in EMPTY:
            raise TypeError(f"a {kind} whose {name} would be lost")
    return fields


@dataclass(frozen=True, eq=False)
class Examples:
    """Prompts with responses as tokens, one example after the other.

    lengths  of the examples
    counted  whether a token is one that the model is to write
    filler   the id after the end of an example

    Shapes   tokens and counted (N,), lengths (n,)
    Dtype    tokens uint16 or uint32, lengths int64, counted bool
    """

    tokens: np.ndarray
    lengths: np.ndarray
    counted: np.ndarray
    filler: int

    @cached_property
    def starts(self) -> np.ndarray:
        """Places of the first tokens of the examples, (n,) int64."""
        return np.asarray(np.cumsum(self.lengths) - self.lengths)

    @property
    def size(self) -> int:
        """Number of tokens."""
        return int(self.tokens.size)

    @property
    def count(self) -> int:
        """Number of examples."""
        return int(self.lengths.size)

    def prompt(self, number: int) -> list[int]:
        """Return the tokens of a prompt."""
        tokens, counted = self.row(number)
        prompt: list[int] = tokens[: counted.argmax()].tolist()
        return prompt

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of an example, and which of them count."""
        place = slice(self.starts[number], self.starts[number] + self.lengths[number])
        return self.tokens[place], self.counted[place]

    def batch(self, numbers: np.ndarray, sequence_length: int) -> Weighted:
        """Return some examples as sequences. The weights' mean is 1, and they are equal where targets count, else 0.

        numbers  of examples; -1 for a sequence in which no target counts

        Shapes   numbers (B,) -> tokens, targets, weights (B, T)
        Dtype    int32, weights float64
        """
        places = np.arange(sequence_length + 1)
        inside = places < self.lengths[numbers, None]
        indices = np.minimum(self.starts[numbers, None] + places, self.size - 1)
        rows = np.where(inside, self.tokens[indices], self.filler).astype(np.int32)
        counted = (inside & self.counted[indices] & (numbers >= 0)[:, None])[:, 1:]
        weights = counted * (counted.size / counted.sum())
        return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:]), weights

    def validation_batches(self, batch_size: int, sequence_length: int, most: int) -> list[Weighted]:
        """Return all examples once, or as many as fit into a number of batches, evenly spread.

        The weights' mean over all of them is 1.
        """
        count = min(most, -(-self.count // batch_size))
        numbers = np.arange(count * batch_size) * max(self.count, count * batch_size) // (count * batch_size)
        numbers[numbers >= self.count] = -1
        tokens, targets, weights = self.batch(numbers, sequence_length)
        return list(zip(*(part.reshape(count, batch_size, -1) for part in (tokens, targets, weights))))


def read_examples(
    source: Source, codec: Encoding, fraction: float, held_out: str, sequence_length: int
) -> tuple[list[Examples], str, str]:
    """Return the examples for training and those held out, a description of the source, and a digest of its pairs.

    fraction   held out; with 0 or 1, all examples are in the one part that is returned

    An example that is longer than a sequence and the token after it is cut there; one whose response would be lost is
    left out.

    Errors   as of read_pairs; ValueError if a part would have no example, or for chats without a chat template
    """
    conversations, places, wrong = read_pairs(source)
    plain = all(tuple(message.role for message in conversation) == PAIR for conversation in conversations)
    parts: tuple[list[tuple[np.ndarray, np.ndarray]], ...] = ([], [])
    most, cut, lost = sequence_length + 1, 0, 0
    template, rule = template_of(codec), "the model's tokenizer must have a chat template, for chats of other roles"
    advice = "Start from a chat model (--init), or give pairs of prompt and response alone."
    require(template is not None or plain, WHERE, rule, {"data": source.name, "encoding": title_of(codec.name)}, advice)
    for run in runs(len(conversations), 1, fraction, held_out):
        for number in range(run.start, run.stop):
            tokens, counted = _example(conversations[number], codec, template, places[number])
            if not counted[:most].any():
                lost += 1
                continue
            cut += tokens.size > most
            parts[run.held_out].append((tokens[:most], counted[:most]))
    unused = f"{len(wrong):,} left out: empty, or without an assistant ({wrong[0]})" if wrong else ""
    rule, got = "each part must have an example that fits", {"data": source.name, "pairs": len(conversations)}
    got |= {"too long": lost} | ({"others": unused} if wrong else {})
    divided, filled = 0 < fraction < 1, [rows for rows in parts if rows]
    advice = f"Give more pairs, or a larger --sequence-length{', or another --validation-fraction' * divided}."
    require(len(filled) == 1 + divided, WHERE, rule, got, advice)
    examples = [
        Examples(
            np.concatenate([tokens for tokens, _ in rows]),
            np.array([tokens.size for tokens, _ in rows]),
            np.concatenate([counted for _, counted in rows]),
            codec.eot_token,
        )
        for rows in filled
    ]
    noun = "pair" if plain else "conversation"
    counts = " and ".join(number_of(len(rows), noun) for rows in filled)
    facts = [source.described, counts + " held out" * (len(filled) > 1)]
    facts += ["in the form of the chat template"] if template else []
    facts += [f"{cut:,} cut to {most:,} tokens"] if cut else []
    facts += [f"{lost:,} left out for prompts that alone are longer"] if lost else []
    facts += [unused] if wrong else []
    # Roles are left out of pairs, and what all messages have in common of the others.
    said = [[one.content if plain else one[: 2 + (not one.learned)] for one in messages] for messages in conversations]
    return examples, f"{source.name} ({'; '.join(facts)})", digest_of(said)


def _example(
    conversation: Conversation, codec: Encoding, template: ChatTemplate | None, place: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of an example, and which of them the model is to write: up to an end-of-text.

    Each part is encoded apart, as in generation, where only what comes before it is known.
    """
    parts = [Part(message.content, message.role == ASSISTANT) for message in conversation]
    if template:
        parts = template.parts(conversation, place)
    encoded = [codec.encode(part.text, place) for part in parts]
    if not template:
        encoded[-1] = np.append(encoded[-1], np.array(codec.eot_token, encoded[-1].dtype))
    counted = [np.full(tokens.size, part.learned) for tokens, part in zip(encoded, parts)]
    for tokens, numbers in zip(encoded, counted):
        (ends,) = np.nonzero(tokens == codec.eot_token)
        numbers[ends[-1] + 1 if ends.size else tokens.size :] = False
    counts = np.concatenate(counted)
    counts[:1] = False  # nothing comes before it
    return np.concatenate(encoded), counts
