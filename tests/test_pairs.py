"""Tests of training on pairs and chats, of which only what the assistant says counts, and of chat templates."""

import io
import json
import math
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from llama_files import llama_tensors, write_gguf_llama
from small_runs import MODEL, config_of, losses_of, metrics_of, same, stopping_at

import daskgpt
from daskgpt import generate, train
from daskgpt.config.run import OptimizerConfig
from daskgpt.data.dataset import batch, load_dataset, validation_batches
from daskgpt.data.pairs import ChatTemplate, Message, Part, read_examples, read_pairs
from daskgpt.data.source import recognize
from daskgpt.formats.encoding import get_encoding
from daskgpt.generation.sampler import sanitized
from daskgpt.model.parameters import value_count
from daskgpt.profiling.plan import Plan
from daskgpt.schedulers import machine
from daskgpt.training.checkpoint import open_model_file

END = 256
# Of several lengths; the last two are longer than a sequence of 16 tokens and its end, one already by its prompt.
PAIRS = [(f"{number}+1=", str(number + 1)) for number in range(38)] + [("a" * 9, "b" * 9), ("c" * 17, "d")]
SHAPE = {"batch_size": 4, "sequence_length": 16}
DROPPING = OptimizerConfig(dropout=0.2, warmup=3)


def write_pairs(path, pairs=PAIRS):
    path.write_text("".join(json.dumps({"prompt": one, "response": other}) + "\n" for one, other in pairs))
    return path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return write_pairs(tmp_path_factory.mktemp("pairs") / "pairs.jsonl")


def fit(pairs, out, *, data=None, optimizer=DROPPING, dataflow=None, on_step=None, **run):
    data = SHAPE | {"data": str(pairs), "groups": 4} | (data or {})
    settings = {"steps": 6, "validation_batches": 2, "validate_every": 4, "save_minutes": 0, "out": str(out)} | run
    return daskgpt.fit(MODEL, data, optimizer, dataflow, settings, on_step=on_step, quiet=True)


def test_examples_and_their_counted_targets(pairs):
    dataset = load_dataset(str(pairs), sequence_length=16)
    assert "35 pairs and 4 pairs held out; 1 cut to 17 tokens; 1 left out" in dataset.description
    seen = {}
    for step in range(9):  # an epoch, and a sequence of the next one
        tokens, targets, weights = batch(dataset.training, **SHAPE, seed=3, step=step, order=dataset.order)
        assert weights.mean() == pytest.approx(1)
        for row, following, weight in zip(tokens, targets, weights):
            assert row[1:].tolist() == following[:-1].tolist()
            text, response = (
                bytes(row[row != END].tolist()),
                bytes(following[(weight > 0) & (following != END)].tolist()),
            )
            ends = (following[weight > 0] == END).sum()
            seen[text.decode()] = response.decode(), int(ends)
    held = [bytes(dataset.validation.prompt(number)).decode() for number in range(4)]
    assert bytes(dataset.prompt).decode() == held[0]
    trained = [(one, other) for one, other in PAIRS[:-1] if one not in held]
    cut = {"aaaaaaaaabbbbbbb": ("bbbbbbbb", 0)}
    assert seen == {one + other: (other, 1) for one, other in trained if one[0] != "a"} | cut


def test_validation_counts_every_held_out_target_once(pairs):
    tokens = load_dataset(str(pairs), validation_fraction=0.15, sequence_length=16).validation
    assert tokens.count == 6
    for size, most, count, examples in ((4, 9, 2, 6), (6, 1, 1, 6), (2, 2, 2, 4)):
        batches = list(validation_batches(tokens, batch_size=size, sequence_length=16, count=most))
        weights = np.concatenate([weights for _, _, weights in batches])
        assert (len(batches), int((weights.max(-1) > 0).sum())) == (count, examples)
        assert weights.mean() == pytest.approx(1)
        assert len(set(weights[weights > 0])) == 1


@pytest.fixture(scope="module")
def whole(pairs, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    fit(pairs, out, dataflow={"scheduler": "sync", "batch_chunk": 4, "sequence_chunk": 16})
    return out


def test_chunks_micro_batches_and_resuming_change_no_bit(pairs, whole, tmp_path):
    dials = {"scheduler": "threads", "threads": 2, "batch_chunk": 1, "sequence_chunk": 4}
    fit(pairs, tmp_path / "chunks", dataflow=dials | {"barrier": "none"})
    fit(pairs, tmp_path / "micro", data={"batch_size": 2, "accumulate": 2}, dataflow=dials)
    fit(pairs, tmp_path / "stopped", on_step=stopping_at(3))
    daskgpt.fit(resume=tmp_path / "stopped", dataflow=dials, quiet=True)
    assert all(same(tmp_path / name, whole) for name in ("chunks", "micro", "stopped"))
    losses = [
        [r["validation_loss"] for r in metrics_of(folder) if "validation_loss" in r] for folder in tmp_path.iterdir()
    ]
    assert losses == [losses[0]] * 3
    assert len(losses[0]) == 2


def test_two_workers_give_the_bits_of_one_process(cluster, pairs, whole, tmp_path):
    cluster.have(2)
    fit(pairs, tmp_path / "run", dataflow={"scheduler": cluster.address})
    assert same(tmp_path / "run", whole)


def test_chunks_change_no_bit_in_bfloat16(pairs, tmp_path):
    for number, dials in enumerate(({"batch_chunk": 4}, {"batch_chunk": 2, "sequence_chunk": 8, "threads": 2})):
        fit(pairs, tmp_path / str(number), dataflow=dials | {"precision": "bfloat16"}, steps=3)
    assert same(tmp_path / "0", tmp_path / "1")


def test_a_plan_counts_what_was_read_once(pairs, whole, monkeypatch):
    plans, numbers = list[Plan](), value_count(MODEL)
    monkeypatch.setattr(train, "print", plans.append, raising=False)
    for flags, copies in (f"--preset finetune --data {pairs} --init {whole}", 1), (f"--resume {whole} --steps 99", 3):
        monkeypatch.setattr(machine, "resident_memory", lambda held=4 * numbers * copies: 10**8 + held)
        assert train.main([*flags.split(), "--plan"]) == 0
        assert plans[-1].libraries == 10**8


def test_fine_tuning_from_the_command_line(pairs, whole, tmp_path, capsys):
    """The recipe's length is in epochs; a length, as any other flag, takes the place of the recipe's. Its sequences
    are no longer than the model's positions.
    """
    flags = f"--preset finetune --data {pairs} --learning-rate 0.003 --sample-tokens 8".split()
    with pytest.raises(ValueError, match="must have a model to start from; got preset=finetune"):
        train.main(flags)
    out = tmp_path / "tuned"
    flags += ["--init", str(whole)]
    assert train.main([*flags, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    settings, losses = config_of(out), losses_of(out)
    assert settings["data"]["sequence_length"] == MODEL.positions == 16
    with pytest.raises(ValueError, match="must not be longer than the model's positions; got sequence_length=17"):
        train.main([*flags, "--sequence-length", "17", "--out", str(tmp_path / "long")])
    assert (settings["run"]["epochs"], settings["run"]["steps"]) == (3, math.ceil(3 * 35 / 8))
    assert (settings["optimizer"]["clip"], settings["data"]["batch_size"]) == (1, 8)
    assert losses[-1] < losses[0] - 0.5
    samples = [line for line in said.splitlines() if line.startswith("--- sample after")]
    assert [line.split()[3] for line in samples] == ["0", "14"]
    prompt = bytes(load_dataset(str(pairs), sequence_length=16).prompt).decode()
    assert said.count(f"\n{prompt}") == 2
    assert train.main([*flags, "--steps", "2", "--out", str(tmp_path / "short")]) == 0
    assert len(losses_of(tmp_path / "short")) == 2


def test_chat_gives_lines_the_form_of_the_template(pairs, whole, called):
    """Each is a text of its own then; so is --prompt."""
    config, parameters = daskgpt.load(whole)

    def answer(prompt):
        tokens = daskgpt.sample(config, parameters, list(prompt.encode()), 6, temperature=0, end=END)
        return bytes(token for token in tokens if token != END)

    def told(typed, *flags):
        return called(generate, whole, "--tokens", 6, "--temperature", 0, *flags, typed=typed)[1]

    form = r"<{}>\n"
    first, second = ("".join(sanitized([answer(f"<{line}>\n"), b"\n"])) for line in "xy")
    assert told("x\ny\n", "-i", "--template", form) == first + second + "\n"
    assert told("", "--template", form, "--prompt", "x") == "<x>\n" + first
    assert told("", "--prompt", "x") == "x" + "".join(sanitized([answer("x"), b"\n"]))
    with pytest.raises(ValueError, match="must have one {}"):
        told("", "--template", "Q: A:")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"prompt": "a", "response": ', "JSON in UTF-8.*line 42.*JSONDecodeError"),
        (b'{"prompt": "a", "text": "b"}', '"response".*line 42, found=a record with the fields prompt, text[.]'),
        (b'{"prompt": "\xff", "response": "b"}', "not UTF-8"),
        (b'{"messages": [{"role": "user"}]}', "line 42, found=a message with the fields role[.]"),
    ],
)
def test_wrong_lines_are_refused_by_number(tmp_path, line, said):
    path, out = write_pairs(tmp_path / "pairs.jsonl"), tmp_path / "run"
    path.write_bytes(b"\n" + path.read_bytes() + line + b"\n")
    with pytest.raises(ValueError, match=said):
        train.main(["--data", str(path), "--out", str(out)])
    assert not out.exists()


def test_a_few_short_pairs_suffice(tmp_path):
    dataset = load_dataset(str(write_pairs(tmp_path / "pairs.jsonl", PAIRS[:8])), sequence_length=64)
    assert (dataset.training.count, dataset.validation.count) == (7, 1)
    assert dataset.validation.size < 64


def test_too_few_pairs_are_refused(tmp_path):
    for pairs, said in (
        (PAIRS[:3], "pairs=3, too long=0"),
        ([PAIRS[-1]] * 9, "pairs=9, too long=9"),
        ([], "must not be empty"),
    ):
        with pytest.raises(ValueError, match=said):
            load_dataset(str(write_pairs(tmp_path / "pairs.jsonl", pairs)), sequence_length=16)


# Chat templates: conversations as text, what the assistant wrote in it, and templates that do not fit

CHATML = """{% for message in messages %}
{% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}
{%- endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + eos_token + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
NAMES = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
TALK = [
    Message("user", "Who?"),
    Message("assistant", "I."),
    Message("user", "é <b> 'quoted'"),
    Message("assistant", "Yes\nindeed"),
    Message("user", "Bye"),
]
SYSTEM = Message("system", "s")
# As templates do that drop the thoughts of earlier answers.
SHORTENING = """{% for message in messages %}
{{ message.content if loop.last or message.role == 'user' else message.content[0] }}{% endfor %}"""


def test_a_conversation_as_text():
    template = ChatTemplate(CHATML, NAMES)
    begin = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n"
    assert template.text(TALK[:1]) == begin
    assert template.text(TALK[:1], reply=True) == begin + "<|im_start|>assistant\n"
    system = [Message("system", "Short.")]
    assert template.text(system + TALK[:1]).startswith("<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user\n")


def test_what_the_assistant_wrote():
    template = ChatTemplate(CHATML, NAMES)
    parts = template.parts(TALK)
    assert [part.text for part in parts if part.learned] == ["I.<|im_end|>\n", "Yes\nindeed<|im_end|>\n"]
    assert "".join(part.text for part in parts) == template.text(TALK[:4])
    assert parts[0] == Part(template.text(TALK[:1], reply=True), False)
    assert template.parts(TALK[:1]) == []


def test_what_templates_may_use():
    source = """{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif -%}
    {% if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}{% endgeneration %}{% else -%}
    {{ {'a': m.content} | tojson }}{% endif %}{% endfor %}{{ strftime_now is defined }}{{ (tools, documents) }}"""
    talk = [Message("tool", ""), TALK[2], Message("assistant", " x ")]
    assert ChatTemplate(source, NAMES).text(talk) == """{"a": "é <b> 'quoted'"}xFalse(None, None)"""


@pytest.mark.parametrize(
    ("source", "keyword"),
    [
        ("{% for message in messages %}", "must be valid; .*TemplateSyntaxError"),
        ("{% for n in [1] %}" * 30 + "{% endfor %}" * 30, "must be valid; .*nested"),
        ("{% for n in range(10**9) %}{% endfor %}", "must take these messages.*OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "must take these messages.*RecursionError"),
        ("{{ raise_exception('roles must alternate') }}", "must take these messages.*roles must alternate"),
        ("{{ messages.append(1) }}", "must take these messages.*append"),
        ("{{ ''.__class__.__mro__ }}", "must take these messages.*__class__"),
        ("{{ messages | length }}{{ messages[-1].content }}", "must leave the text of earlier messages"),
        (SHORTENING, "must leave the text of earlier messages.*message=4"),
    ],
)
def test_templates_that_do_not_fit_are_refused(source, keyword):
    with pytest.raises(ValueError, match=keyword):
        ChatTemplate(source, NAMES).parts(TALK)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interruption_is_not_taken_for_the_templates(error):
    template = ChatTemplate(CHATML, NAMES)
    template.template = SimpleNamespace(render=Mock(side_effect=error))
    with pytest.raises(error):
        template.text(TALK)


def test_a_conversation_that_does_not_fit_is_named():
    for source in ("{{ messages[0].content if messages else 'Be good.' }}", "{{ messages[0].content }}"):
        with pytest.raises(ValueError, match="a line 3: a conversation must begin with what the assistant answers"):
            ChatTemplate(source, NAMES).parts(TALK[1:], "a line 3")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A model whose template is the contents, each with an end."""
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    write_gguf_llama(path, llama_tensors())
    return path


@pytest.fixture
def encoding(path):
    return get_encoding(open_model_file(path).encoding)


def test_models_with_a_chat_template_answer(path, encoding, called):
    """A prompt is what a user says; a chat is one conversation, with what was said before, and the model told."""
    config, parameters = daskgpt.load(path)

    def answer(text):
        """What the model says after a text, up to the end of its message: as text, and as it is shown."""
        ids = encoding.encode(text, "test")
        tokens = daskgpt.sample(config, parameters, ids, 5, temperature=0, end=encoding.eot_token)
        reply = [token for token in tokens if token != encoding.eot_token]
        return encoding.decode(reply), "".join(sanitized(encoding.tokens[token] for token in reply))

    def said(typed, *flags):
        return called(generate, path, "--tokens", 5, "--temperature", 0, *flags, typed=typed)[1]

    first, shown = answer("a 12<|end|>")
    assert said("", "--prompt", "a 12") == f"a 12\n{shown}\n"
    _, then_shown = answer(f"a 12<|end|>{first}<|end|>b<|end|>")
    assert said("a 12\nb\n", "-i") == f"{shown}\n{then_shown}\n\n"
    _, shown = answer("Hush<|end|>a 12<|end|>")
    assert said("a 12\n", "-i", "--system", "Hush") == f"{shown}\n\n"
    assert said("", "--prompt", "a 12", "--template", "{}").startswith("a 12")
    with pytest.raises(ValueError, match="without a chat template"):
        said("", "--template", "{}", "--system", "Hush")


ANSWERS = [("ab", "", [1]), ("a<|end|>", "", [1, 3]), ("a<|text|>", "<|text|>", [1, 3]), ("", "", [1])]


@pytest.mark.parametrize(("answer", "until", "messages"), ANSWERS)
def test_an_empty_line_continues_an_answer_that_has_not_ended(
    answer, until, messages, path, encoding, monkeypatch, capsys
):
    """After a complete one it is a message. The template ends messages: the text of an answer has no end."""
    asked, answers = [], [encoding.encode(text, "test").tolist() if text else [] for text in (answer, "c")]
    answers[1].append(encoding.n_vocab)  # a model may have more ids

    def write(writer, texts):
        for token in answers.pop(0):
            texts.tokens[0].append(token)
            yield [token]

    def asking(writer, said):
        asked.append(len(said))
        assert "<|" not in str(said)
        return writer.template.text(said, reply=True)

    monkeypatch.setattr(generate.Writer, "write", write)
    monkeypatch.setattr(generate.Writer, "asking", asking)
    monkeypatch.setattr("sys.stdin", io.StringIO("a 1\n\n"))
    assert generate.main([str(path), "-i"] + ["--until", until] * bool(until)) == 0
    assert (asked[1:], answers) == (messages, [])  # the first one is of --prompt
    capsys.readouterr()


def test_pairs_are_learned_in_the_form_of_the_template(encoding, tmp_path):
    pairs = [{"prompt": f"a{n}", "response": f"the {n}"} for n in range(30)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    examples = load_dataset(str(tmp_path / "pairs.jsonl"), encoding.name, sequence_length=12).training
    assert examples.count == 27
    tokens, counted = examples.row(3)
    assert encoding.decode(tokens) == "a3<|end|>the 3<|end|>"
    assert encoding.decode(tokens[counted]) == "the 3<|end|>"
    assert examples.prompt(3) == encoding.encode("a3<|end|>", "test").tolist()
    rows, targets, weights = examples.batch(np.array([3, 4]), 12)
    assert encoding.decode(targets[0][weights[0] > 0]) == "the 3<|end|>"
    assert weights.mean() == pytest.approx(1)
    assert (rows[0, len(tokens) :] == encoding.eot_token).all()


CHATS = [
    {"messages": [{"role": role, "content": text} for role, text, _ in [SYSTEM, *TALK]]},
    {"messages": [{"role": "user", "content": "nobody answers"}]},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": []}]},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "source": "x"},
]
SHARED = [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return recognize(str(path))


def test_chats_are_conversations(tmp_path):
    (talk, short), _, left_out = read_pairs(write(tmp_path / "chats.json", CHATS))
    assert talk == (SYSTEM, *TALK)
    for more, told in (("s", talk), ("t", (Message("system", "t"), *talk))):
        assert read_pairs(write(tmp_path / "told.json", [CHATS[0] | {"system": more}]))[0] == [told]
    assert left_out == ["chats.json line 2", "chats.json line 3"]
    assert read_pairs(write(tmp_path / "shared.json", SHARED)) == ([short], ["shared.json line 1"], [])
    rule = '"messages", each with "role" and "content".*line 5, found=a message .* role, text[.]'
    with pytest.raises(ValueError, match=rule):
        read_pairs(write(tmp_path / "wrong.json", [*CHATS, {"messages": [{"role": "user", "text": "a"}]}]))


def test_chats_need_a_template(tmp_path):
    source = write(tmp_path / "chats.json", CHATS)
    with pytest.raises(ValueError, match="must have a chat template.*encoding=bytes"):
        read_examples(source, get_encoding("bytes"), 0.0, "spans", 300)
    (examples,), said, _ = read_examples(
        write(tmp_path / "shared.json", SHARED), get_encoding("bytes"), 0.0, "spans", 9
    )
    assert bytes(examples.row(0)[0][:-1].tolist()) == b"ab"
    assert "1 pair)" in said


def test_every_message_of_the_assistant_counts(encoding, tmp_path):
    (examples,), said, _ = read_examples(write(tmp_path / "chats.json", CHATS), encoding, 0.0, "spans", 300)
    assert "2 conversations" in said
    tokens, counted = examples.row(0)
    assert encoding.decode(tokens) == "s<|end|>Who?<|end|>I.<|end|>é <b> 'quoted'<|end|>Yes\nindeed<|end|>"
    assert encoding.decode(tokens[counted]) == "I.<|end|>Yes\nindeed<|end|>"


def test_a_message_of_weight_0_is_read_and_not_learned(encoding, tmp_path):
    def weighing(*weights):
        messages = CHATS[0]["messages"]
        return {"messages": [one | {"weight": weight} for one, weight in zip(messages, (0, 0, *weights, None))]}

    records = [weighing(0, 1, 1), weighing(0, 0, 0), weighing(1.0, None, 1), CHATS[0]]
    (examples,), said, digest = read_examples(write(tmp_path / "chats.json", records), encoding, 0.0, "spans", 300)
    assert "1 left out: empty, or without an assistant (chats.json line 2)" in said
    assert encoding.decode(examples.row(0)[0][examples.row(0)[1]]) == "Yes\nindeed<|end|>"
    assert all((one == other).all() for one, other in zip(examples.row(1), examples.row(2)))
    assert (examples.row(0)[0] == examples.row(1)[0]).all()
    records[0] = CHATS[0]
    assert read_examples(write(tmp_path / "chats.json", records), encoding, 0.0, "spans", 300)[2] != digest
    with pytest.raises(ValueError, match="line 1, found=a message with the weight 0.5"):
        read_pairs(write(tmp_path / "wrong.json", [weighing(1, 1, 0.5)]))


def test_a_tuned_chat_model_reads_conversations_longer_than_its_examples(path, tmp_path, monkeypatch, capsys):
    write(tmp_path / "pairs.json", [{"prompt": "a 1", "response": f"{n}"} for n in range(12)])
    flags = ["--data", tmp_path / "pairs.json", "--batch-size", 2, "--sequence-length", 6, "--sample-tokens", 0]
    flags += ["--steps", 1, "--init", path, "--out", tmp_path / "run"]
    assert train.main([*map(str, flags)]) == 0
    contexts = []
    monkeypatch.setattr(generate, "write_all", lambda writer, prompts: contexts.append(writer.context))
    assert generate.main([str(tmp_path / "run"), "--prompt", "a"]) == 0
    assert generate.main([str(tmp_path / "run"), "--prompt", "a", "--template", "{}"]) == 0
    assert contexts == [24, 6]
