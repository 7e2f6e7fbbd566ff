"""Adapters as PEFT writes them: a folder that Hugging Face's library `peft` loads over the model that they adapt."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from daskgpt.config.errors import require
from daskgpt.config.files import appearing, write_file
from daskgpt.formats.huggingface import family_in_folder, json_text
from daskgpt.formats.layouts import GPT2, Part, parts_of
from daskgpt.formats.safetensors import ENDING, write_tensor_file
from daskgpt.formats.stored_model import FilePath, StoredModel
from daskgpt.model.parameters import LORA_A, LORA_B, tensors

CONFIG, MODEL, WHERE = "adapter_config.json", f"adapter_model{ENDING}", "write_peft"
PREFIX = "base_model.model."  # that the library adds to the names of transformers


def write_peft(folder: FilePath, model: StoredModel) -> None:
    """Write the adapters of a model, which were merged; the folder appears under its name only when it is complete.

    Layout   each linear layer of transformers has its own adapter; those of queries, keys and values, and of gate and
             up, have a common A. The scale lora_alpha / r is 1
    Errors   ValueError for a model without adapters, or that Hugging Face's formats cannot express
    Source   peft, LoraConfig and save_pretrained
    """
    rule, advice = "the model must have adapters", "Give a run that was trained with --lora."
    require(bool(model.adapters), WHERE, rule, {"lora": 0}, advice)
    config, family = model.config, family_in_folder(model.config, WHERE)
    prefix = PREFIX + ("transformer." if family == GPT2 else "")
    places: dict[str, tuple[str, Part | None]] = {}
    for name, tensor in tensors(config).items():
        for part in parts_of(config, tensor, family) if tensor.row.is_conv1d else ():
            layer, ours = prefix + part.name.removesuffix(".weight"), name.removesuffix(".weight")
            places |= {f"{layer}.lora_A.weight": (ours + LORA_A, None), f"{layer}.lora_B.weight": (ours + LORA_B, part)}

    def read(name: str) -> np.ndarray:
        ours, part = places[name]
        return model.adapters[ours][part.rows if part else slice(None)]

    shapes = {name: read(name).shape for name in places}
    modules = sorted({name.split(".")[-3] for name in places})
    rank = next(shape[0] for name, shape in shapes.items() if "lora_A" in name)
    settings: dict[str, object] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none"}
    settings |= {"r": rank, "lora_alpha": rank, "lora_dropout": 0.0, "target_modules": modules}
    settings |= {"fan_in_fan_out": family == GPT2, "inference_mode": True, "base_model_name_or_path": None}
    with appearing(Path(folder), WHERE) as inside:
        write_tensor_file(inside / MODEL, shapes, read, {"format": "pt"}, where=WHERE)
        write_file(inside / CONFIG, json_text(settings), WHERE)
