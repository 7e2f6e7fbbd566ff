"""GPT-2 in Hugging Face's transformers, in a process of its own that writes text on request."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
import transformers

from compare.pipes import serve
from daskgpt.config.model import ModelConfig
from daskgpt.model.parameters import initial_parameters, tensors


def model_of(config: ModelConfig, seed: int) -> Any:
    """Return their model with our initial values."""
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


class Generation:
    """A model that writes."""

    def start(self, config: ModelConfig, seed: int, threads: int) -> str:
        """Make the model; return how the program is called."""
        torch.set_num_threads(threads)
        torch.set_flush_denormal(True)
        self.model = model_of(config, seed)
        return f"transformers {transformers.__version__}, PyTorch {torch.__version__}, float32"

    def write(self, prompt: list[int], count: int) -> tuple[float, list[int]]:
        """Write so many tokens after a prompt, the likeliest ones; return the seconds, and the tokens."""
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "use_cache": True, "pad_token_id": 0}
        begin = perf_counter()
        with torch.inference_mode():
            found = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **options)
        return perf_counter() - begin, found[0, ids.shape[1] :].tolist()


if __name__ == "__main__":
    generation = Generation()
    serve({"start": generation.start, "write": generation.write})
