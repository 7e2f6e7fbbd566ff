"""A model in Hugging Face's transformers, in a process of its own that writes text on request."""

from __future__ import annotations

import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers

from compare.pipes import serve
from daskgpt.config.model import ModelConfig
from daskgpt.formats.huggingface import write_huggingface
from daskgpt.formats.stored_model import StoredModel
from daskgpt.model.parameters import initial_parameters


def model_of(config: ModelConfig, seed: int) -> Any:
    """Return their model with our initial values, read from a folder of theirs."""
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="daskgpt-") as folder:
        write_huggingface(Path(folder) / "model", StoredModel(config, initial_parameters(config, seed)))
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(Path(folder) / "model", dtype=torch.float32)
    model.eval()
    model.generation_config.eos_token_id = None
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
            tokens = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **options)
        return perf_counter() - begin, tokens[0, ids.shape[1] :].tolist()


if __name__ == "__main__":
    generation = Generation()
    serve({"start": generation.start, "write": generation.write})
