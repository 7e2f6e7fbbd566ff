"""GPT-2 in Hugging Face's transformers, in a process of its own that writes when it is told to."""

from __future__ import annotations

import os
import sys
from time import perf_counter
from typing import Any

import torch
import transformers

from daskgpt.config.model import GPT2Config
from daskgpt.instruments import machine
from daskgpt.instruments.compare.messages import Cpu, Peak, ResetPeak, Start, Write, receive, send
from daskgpt.model.parameters import initial_parameters, tensors


def model_of(config: GPT2Config, seed: int) -> Any:
    """Their model with our initial values."""
    settings = transformers.GPT2Config(
        n_layer=config.blocks,
        n_head=config.heads,
        n_embd=config.channels,
        n_positions=config.positions,
        vocab_size=config.vocabulary,
        bos_token_id=0,
        eos_token_id=None,
    )
    model: Any = transformers.GPT2LMHeadModel(settings)
    model.eval()
    values = initial_parameters(config, seed)
    state = {}
    for name, tensor in tensors(config).items():
        value = values[name][: config.vocabulary] if name == "wte.weight" else values[name]
        state[f"transformer.{name}"] = torch.from_numpy(value.T.copy() if tensor.row.is_conv1d else value.copy())
    missing, unexpected = model.load_state_dict(
        state | {"lm_head.weight": state["transformer.wte.weight"]}, strict=False
    )
    assert not unexpected, unexpected
    assert all(name.endswith((".attn.bias", ".attn.masked_bias")) for name in missing), missing
    return model


def main() -> None:
    """Answer messages until there are no more."""
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    start: Start = receive(questions)
    torch.set_num_threads(start.threads)
    torch.set_flush_denormal(True)
    model = model_of(start.config, start.seed)
    send(answers, f"transformers {transformers.__version__}, PyTorch {torch.__version__}, float32")
    while True:
        try:
            message = receive(questions)
        except EOFError:
            return
        if isinstance(message, Write):
            ids = torch.tensor([message.prompt])
            begin = perf_counter()
            with torch.inference_mode():
                found = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=message.count,
                    do_sample=False,
                    use_cache=True,
                    pad_token_id=0,
                )
            send(answers, (perf_counter() - begin, found[0, ids.shape[1] :].tolist()))
        elif isinstance(message, Cpu):
            send(answers, machine.processor_time())
        elif isinstance(message, Peak):
            send(answers, machine.peak_memory())
        elif isinstance(message, ResetPeak):
            send(answers, machine.reset_peak_memory())


if __name__ == "__main__":
    main()
