"""A model in PyTorch, as its users write it, trained in a process of its own on batches that come over a pipe.

Its parameters have daskgpt's names. The embedding has no padding rows: a loss over a part of the rows would cost
PyTorch a pass over the whole table.
"""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from compare.pipes import TorchOptions, serve
from daskgpt.config.model import ModelConfig
from daskgpt.config.run import OptimizerConfig
from daskgpt.model.parameters import initial_parameters, tensors


class Rotary(nn.Module):
    """Channels i and i + half of each head, turned by the angles of their position."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        half = config.head_channels // 2
        rates = config.rope_theta ** -(torch.arange(half, device="cpu", dtype=torch.float64) / half)
        turns = config.rope_positions * rates / (2 * torch.pi)
        whole = ((turns - config.rope_low) / (config.rope_high - config.rope_low)).clamp(0, 1)
        rates = rates * (whole + (1 - whole) / config.rope_factor)
        angles = torch.outer(torch.arange(config.positions, device="cpu"), rates)
        self.cosines, self.sines = angles.cos().float(), angles.sin().float()

    def forward(self, x: Tensor) -> Tensor:
        cosines, sines = (table[: x.shape[2]] for table in (self.cosines, self.sines))
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


class Linear(nn.Linear):
    """A linear layer of a block, with its low-rank adapter if the model has them."""

    def __init__(self, config: ModelConfig, inputs: int, outputs: int, *, bias: bool) -> None:
        super().__init__(inputs, outputs, bias=bias)
        if config.lora:
            self.lora_a = nn.Linear(inputs, config.lora, bias=False)
            self.lora_b = nn.Linear(config.lora, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + self.lora_b(self.lora_a(x)) if hasattr(self, "lora_a") else y


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.size, self.parts = config.head_channels, (config.heads, config.key_heads, config.key_heads)
        inside = config.heads * self.size
        self.c_attn = Linear(config, config.channels, sum(self.parts) * self.size, bias=config.bias != "none")
        self.c_proj = Linear(config, inside, config.channels, bias=config.bias == "all")
        if config.qk_norm != "none":
            self.q_norm, self.k_norm = (nn.RMSNorm(self.size, eps=config.norm_eps) for _ in range(2))
        self.turn = Rotary(config) if config.position == "rotary" else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).unflatten(-1, (-1, self.size)).transpose(1, 2).split(self.parts, dim=1)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        shared = self.parts[0] != self.parts[1]
        y = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v, is_causal=True, enable_gqa=shared)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, self.activation = config.hidden_channels, config.activation
        self.gated = self.activation == "swiglu"
        self.c_fc = Linear(config, config.channels, hidden * (2 if self.gated else 1), bias=config.bias == "all")
        self.c_proj = Linear(config, hidden, config.channels, bias=config.bias == "all")

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)
        if self.activation == "relu2":
            return self.c_proj(F.relu(x).square())
        if not self.gated:
            return self.c_proj(F.gelu(x, approximate="tanh"))
        gate, up = x.chunk(2, dim=-1)
        return self.c_proj(F.silu(gate) * up)


def norm_of(config: ModelConfig) -> nn.Module:
    kind = nn.LayerNorm if config.norm == "layernorm" else nn.RMSNorm
    return kind(config.channels, eps=config.norm_eps)


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ln_1, self.attn = norm_of(config), Attention(config)
        self.ln_2, self.mlp = norm_of(config), FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Model(nn.Module):
    """The mean loss of a batch. Without an untied head, the embedding's matrix is the unembedding's too."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocabulary, config.channels)
        self.wpe = nn.Embedding(config.positions, config.channels) if config.position == "learned" else None
        self.h = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.ln_f = norm_of(config)
        self.lm_head = None if config.head == "tied" else nn.Linear(config.channels, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens)
        if self.wpe is not None:
            x = x + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), (self.lm_head or self.wte).weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def model_of(config: ModelConfig, seed: int) -> Model:
    """Return the model with the initial values that daskgpt starts from."""
    with torch.device("meta"):
        model = Model(config)
    values = {name: torch.from_numpy(value) for name, value in initial_parameters(config, seed).items()}
    for table in values.keys() & {"wte.weight", "lm_head.weight"}:
        values[table] = values[table][: config.vocabulary].clone()
    model.load_state_dict(values, assign=True)
    return model


def optimizer_of(model: Model, size: ModelConfig, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Fused AdamW; the same tensors are trained, and decay."""
    table = tensors(size)
    groups: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad_(table[name].trained).requires_grad:
            groups[table[name].decayed(config.decay)].append(parameter)
    return torch.optim.AdamW(
        [
            {"params": groups[True], "weight_decay": config.weight_decay},
            {"params": groups[False], "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


class Training:
    """The training loop of one process."""

    def start(
        self,
        config: ModelConfig,
        optimizer: OptimizerConfig,
        seed: int,
        threads: int,
        options: TorchOptions,
        member: tuple[int, int, str, float] | None,
    ) -> str:
        """Make the model; return PyTorch's version.

        member   of processes that train together: rank, how many they are, path of a file that does not exist yet,
                 where they find each other, and the minutes after which one gives up; None for one that trains alone
        """
        torch.set_flush_denormal(True)  # first of all: threads take it over from the one that starts them
        torch.set_num_threads(threads)
        model: Any = model_of(config, seed)
        self.optimizer = optimizer_of(model, config, optimizer)
        if member:
            rank, size, meeting, minutes = member
            limit, store = timedelta(minutes=minutes), dist.FileStore(meeting, size)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
            # gloo averages gradients while the backward pass continues.
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.model = torch.compile(model) if options.compiled else model
        self.bf16 = options.bf16
        return str(torch.__version__)  # an object of PyTorch would import it in the process that reads it

    def run(self, batches: list[Any]) -> tuple[list[float], list[float]]:
        """Return seconds and loss of a step on each batch."""
        seconds, losses = [], []
        for batch in batches:
            tokens, targets = (torch.from_numpy(array).long() for array in batch)
            begin = perf_counter()
            losses.append(self.step(tokens, targets))
            seconds.append(perf_counter() - begin)
        return seconds, losses

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16) if self.bf16 else nullcontext():
            loss = self.model(tokens, targets)
        loss.backward()
        self.optimizer.step()
        return float(loss.item())


if __name__ == "__main__":
    training = Training()
    serve({"start": training.start, "run": training.run})
    if dist.is_initialized():
        dist.destroy_process_group()
