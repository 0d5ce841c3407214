"""Our models in idiomatic PyTorch, to be timed by `pytorch_step.py`.

Softmax is ``scaled_dot_product_attention``. Linear attention and cosFormer are two
batched products; if causal, chunks of 64 and a cumulative sum of their states, the
plain form of flash-linear-attention.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Attend = Callable[..., torch.Tensor]
CHUNK = 64


def listops_step(name: str, length: int, compiled: bool) -> Callable[[], None]:
    """ListOps' compact model on one random batch of 32 with padding.

    2 layers of 64, 2 heads, MLP 128, dropout 0.1, learned positions, mean pooling.
    """
    torch.manual_seed(0)
    model = _Classifier(_full(name))
    tokens = torch.randint(1, 16, (32, length))
    lengths = torch.randint(length // 2, length, (32,))
    labels = torch.randint(0, 10, (32,))
    return _step(model, (tokens, lengths), labels, 1e-3, compiled)


def lm_step(name: str, length: int, compiled: bool) -> Callable[[], None]:
    """The tiny language model on one random batch of 16 rows, one document each.

    4 layers of 128, 4 heads, MLP 512, causal convolutions of 4 on queries, keys and
    values, rotary positions for softmax, tied logits.
    """
    torch.manual_seed(0)
    model = _Decoder(name)
    tokens = torch.randint(0, 257, (16, length))
    labels = torch.randint(0, 257, (16, length))
    return _step(model, (tokens,), labels, 2e-3, compiled)


def _step(
    model: nn.Module,
    inputs: tuple[torch.Tensor, ...],
    labels: torch.Tensor,
    rate: float,
    compiled: bool,
) -> Callable[[], None]:
    called: Any = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.98))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        logits = called(*inputs)
        functional.cross_entropy(logits.flatten(0, -2), labels.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def _features(
    name: str, query: torch.Tensor, key: torch.Tensor, longest: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The features of queries and keys `[B, N, T, H]`."""
    if name == "linear":
        return functional.elu(query) + 1, functional.elu(key) + 1
    angles = torch.arange(query.shape[2])[:, None] * (math.pi / 2 / longest)
    query, key = (
        torch.cat([x * torch.cos(angles), x * torch.sin(angles)], -1)
        for x in (functional.relu(query), functional.relu(key))
    )
    return query, key


def _full(name: str, longest: int = 2000) -> Attend:
    """Attention to all positions that a mask `[B, T]` includes."""

    def attend(query: Any, key: Any, value: Any, mask: Any) -> torch.Tensor:
        if name == "softmax":
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask[:, None, None]
            )
        query, key = _features(name, query, key, longest)
        key = key * mask[:, None, :, None]
        sums = (query * key.sum(2, keepdim=True)).sum(-1, keepdim=True)
        return query @ (key.transpose(2, 3) @ value) / sums.clamp_min(1e-6)

    return attend


def _causal(name: str, longest: int) -> Attend:
    """Attention to the current and all earlier positions."""

    def attend(query: Any, key: Any, value: Any) -> torch.Tensor:
        if name == "softmax":
            query, key = _rotate(query), _rotate(key)
            return functional.scaled_dot_product_attention(
                query, key, value, is_causal=True
            )
        query, key = _features(name, query, key, longest)
        length = query.shape[2]
        # The sum of the weights is an additional column of the values.
        value = functional.pad(value, (0, 1), value=1.0)
        query, key, value = (
            functional.pad(x, (0, 0, 0, -length % CHUNK)).unflatten(2, (-1, CHUNK))
            for x in (query, key, value)
        )
        states = key.transpose(-1, -2) @ value
        before = states.cumsum(2) - states
        out = (query @ key.transpose(-1, -2)).tril() @ value + query @ before
        out = out.flatten(2, 3)[:, :, :length]
        return out[..., :-1] / out[..., -1:].clamp_min(1e-6)

    return attend


def _rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions."""
    width = x.shape[-1] // 2
    rates = 10000.0 ** -torch.linspace(0, 1, width)
    angles = torch.arange(x.shape[2])[:, None] * rates
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = torch.cos(angles), torch.sin(angles)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


class _Block(nn.Module):
    """A pre-norm block."""

    def __init__(
        self, attend: Attend, width: int, heads: int, hidden: int, dropout: float
    ):
        super().__init__()
        self.attend, self.heads = attend, heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-6) for _ in range(2))
        self.maps = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.inner = nn.Linear(width, hidden)
        self.outer = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def project(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Queries, keys or values `[B, T, D]`."""
        return self.maps[index](x)

    def forward(self, x: torch.Tensor, *mask: torch.Tensor) -> torch.Tensor:
        """`[B, T, D]` to `[B, T, D]`."""
        normal = self.norms[0](x)
        heads = (
            self.project(index, normal).unflatten(-1, (self.heads, -1))
            for index in range(3)
        )
        query, key, value = (head.transpose(1, 2) for head in heads)
        out = self.attend(query, key, value, *mask).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.maps[3](out))
        hidden = functional.gelu(self.inner(self.norms[1](x)), approximate="tanh")
        return x + self.dropout(self.outer(self.dropout(hidden)))


class _Convolved(_Block):
    """A block with a causal convolution on queries, keys and values."""

    def __init__(self, attend: Attend, width: int, heads: int, hidden: int):
        super().__init__(attend, width, heads, hidden, 0.0)
        self.convs = nn.ModuleList(
            nn.Conv1d(width, width, 4, groups=width, padding=3) for _ in range(3)
        )

    def project(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """See the base class."""
        out = self.convs[index](self.maps[index](x).transpose(1, 2))
        return out[..., : x.shape[1]].transpose(1, 2)


class _Classifier(nn.Module):
    def __init__(self, attend: Attend):
        super().__init__()
        self.tokens = nn.Embedding(16, 64)
        self.positions = nn.Parameter(torch.randn(2000, 64) * 0.02)
        self.blocks = nn.ModuleList(_Block(attend, 64, 2, 128, 0.1) for _ in range(2))
        self.norm = nn.LayerNorm(64, eps=1e-6)
        self.hidden = nn.Linear(64, 128)
        self.logits = nn.Linear(128, 10)
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Logits `[B, 10]`."""
        mask = torch.arange(tokens.shape[1]) < lengths[:, None]
        x = self.dropout(self.tokens(tokens) + self.positions[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x, mask)
        x = self.norm(x) * mask[..., None]
        mean = x.sum(1) / lengths[:, None]
        return self.logits(functional.relu(self.hidden(mean)))


class _Decoder(nn.Module):
    def __init__(self, name: str):
        super().__init__()
        attend = _causal(name, 4096)
        self.tokens = nn.Embedding(257, 128)
        self.blocks = nn.ModuleList(_Convolved(attend, 128, 4, 512) for _ in range(4))
        self.norm = nn.LayerNorm(128, eps=1e-6)
        self.bias = nn.Parameter(torch.zeros(257))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits `[B, T, 257]`."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tokens.weight.T + self.bias
