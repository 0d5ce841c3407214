"""The causal forms that `causal.py` compares: ours, and their peers.

A peer is imported on first use, and an absent one is reported. It takes its arrays in
the layout that it prefers, so no transposition is counted against it.
"""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lra_jax.errors import expected

Function = Callable[[Any, Any, Any], Any]


@dataclass(frozen=True)
class Form:
    """One implementation of a causal mechanism.

    Attributes:
      name: as given to ``--peers``.
      title: as shown.
      library: "jax" or "torch".
      package: the distribution that it comes from.
      computes: the mechanism, by its name in `lra_jax.attention`.
      make: imports it, and returns the function of query, key and value.
      heads_first: takes `[B, N, T, H]`, not `[B, T, N, H]`.
      growth: the exponent of the length in its cost.
      exact: computes the causal mechanism; if not, ``title`` says what it leaves out.
    """

    name: str
    title: str
    library: str
    package: str
    computes: str
    make: Callable[[], Function]
    heads_first: bool = False
    growth: int = 1
    exact: bool = True

    @property
    def ours(self) -> bool:
        """Whether it is a form of this package."""
        return self.package == OURS


def _our(name: str, **options: Any) -> Callable[[], Function]:
    def make() -> Function:
        from lra_jax.attention import registry

        attention = registry.resolve(name).attention
        return functools.partial(attention, is_causal=True, **options)

    return make


def _attnax() -> Function:
    from attnax.kernels.attention import linear_attention

    return linear_attention


def _prefix_sum() -> Function:
    import jax
    import jax.numpy as jnp

    def function(query, key, value):
        query, key = jax.nn.elu(query) + 1, jax.nn.elu(key) + 1
        sums = jnp.cumsum(key[..., :, None] * value[..., None, :], axis=1)
        total = jnp.cumsum(key, axis=1)
        numerator = jnp.einsum("btnm,btnmv->btnv", query, sums)
        return numerator / (jnp.einsum("btnm,btnm->btn", query, total)[..., None] + EPS)

    return function


def _jax_softmax() -> Function:
    import jax

    def function(query, key, value):
        return jax.nn.dot_product_attention(query, key, value, is_causal=True)

    return function


def _torch_softmax() -> Function:
    from torch.nn.functional import scaled_dot_product_attention

    def function(query, key, value):
        return scaled_dot_product_attention(query, key, value, is_causal=True)

    return function


def _fast_transformers() -> Function:
    import torch
    from fast_transformers.causal_product import causal_dot_product
    from torch.nn.functional import elu

    def function(query, key, value):
        query, key = elu(query) + 1, elu(key) + 1
        total = torch.einsum("bntm,bntm->bnt", query, key.cumsum(2)) + EPS
        return causal_dot_product(query, key, value) / total[..., None]

    return function


def _fla() -> Function:
    from torch.nn.functional import elu

    # From its file: the package itself needs Triton, which this form does not.
    package = importlib.util.find_spec("fla")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("No module named 'fla'")
    file = Path(package.origin).parent / "ops" / "linear_attn" / "naive.py"
    spec = importlib.util.spec_from_file_location("fla_linear_attn_naive", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def function(query, key, value):
        features = elu(query) + 1, elu(key) + 1
        return module.naive_chunk_linear_attn(
            *features, value, scale=1.0, normalize=True
        )

    return function


def _buckets() -> Function:
    from linear_attention_transformer.linear_attention_transformer import (
        causal_linear_attn,
    )

    return lambda query, key, value: causal_linear_attn(
        query, key, value, bucket_size=64
    )


JAX, TORCH, OURS, EPS = "jax", "torch", "lra-jax", 1e-6
FORMS = {
    form.name: form
    for form in (
        Form("linear", "linear (ours)", JAX, OURS, "linear", _our("linear")),
        Form(
            "cosformer", "cosFormer (ours)", JAX, OURS, "cosformer", _our("cosformer")
        ),
        Form("flow", "Flow (ours)", JAX, OURS, "flow", _our("flow")),
        *(
            Form(
                f"{name}_xla",
                f"{title}, compiled by XLA (ours)",
                JAX,
                OURS,
                name,
                _our(name, implementation="xla"),
            )
            for name, title in (
                ("linear", "linear"),
                ("cosformer", "cosFormer"),
                ("flow", "Flow"),
            )
        ),
        Form(
            "softmax",
            "softmax, in blocks (ours)",
            JAX,
            OURS,
            "softmax",
            _our("softmax"),
            growth=2,
        ),
        Form("attnax", "attnax", JAX, "attnax", "linear", _attnax, heads_first=True),
        Form(
            "fast_transformers",
            "fast-transformers, C++",
            TORCH,
            "pytorch-fast-transformers",
            "linear",
            _fast_transformers,
            heads_first=True,
        ),
        Form(
            "fla",
            "flash-linear-attention, torch chunks",
            TORCH,
            "flash-linear-attention",
            "linear",
            _fla,
        ),
        Form(
            "buckets",
            "lucidrains buckets (not exact: earlier buckets only)",
            TORCH,
            "linear-attention-transformer",
            "linear",
            _buckets,
            heads_first=True,
            exact=False,
        ),
        Form("prefix_sum", "prefix sum, jax.numpy", JAX, "jax", "linear", _prefix_sum),
        Form(
            "jax_softmax",
            "softmax, jax.nn",
            JAX,
            "jax",
            "softmax",
            _jax_softmax,
            growth=2,
        ),
        Form(
            "torch_softmax",
            "softmax, torch SDPA",
            TORCH,
            "torch",
            "softmax",
            _torch_softmax,
            heads_first=True,
            growth=2,
        ),
    )
}


def chosen(peers: str) -> list[Form]:
    """Our forms, and the peers named: "all", "none" or names between commas.

    Raises:
      ValueError: a name is not known.
    """
    known = [form.name for form in FORMS.values() if not form.ours]
    names = {"all": known, "none": []}.get(peers, peers.split(","))
    for name in names:
        if name not in known:
            wanted = f"'all', 'none' or some of {','.join(known)}"
            raise expected("--peers", wanted, f"{name!r}")
    return [form for form in FORMS.values() if form.ours or form.name in names]
