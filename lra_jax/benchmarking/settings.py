"""The flags of ``python -m lra_jax.benchmark``, and the cases that they ask for."""

import dataclasses
from typing import Literal

from lra_jax.benchmarking import parts, published
from lra_jax.benchmarking.cases import (
    DTYPES,
    FUSED,
    WORKS,
    Case,
    ModelShape,
    parse_lengths,
    parse_names,
    split_list,
)
from lra_jax.errors import Positive, Size, check_types, expected, known

View = Literal["none", "lra", "linformer", "cosformer", "decode", "accelerator"]


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig:
    """The measurements to make, on one device. Unset flags have the view's values."""

    view: View = "none"
    """none: any set of cases. lra: Table 2 of the LRA paper. linformer: Table 3 of the
    Linformer paper. cosformer: Table 5 of the cosFormer paper. decode: one token after
    many, against softmax with its cache of keys and values. accelerator: errors, times
    and two short training runs on this GPU or TPU, in at most 20 minutes."""
    attention: str | None = None
    """Mechanisms, separated by commas, as in `softmax,linformer[features=128]`;
    softmax-fused is the best softmax on the machine."""
    lengths: str | None = None
    """Tokens, as in `1024,2048` or `1K,64K`."""
    work: str | None = None
    """forward, forward+backward, decode (one token after LENGTH others), inference (a
    whole model), train (its training step); several separated by commas."""
    dtypes: str | None = None
    """float32, bfloat16, float16; several separated by commas."""
    batch_size: Size | None = None
    """Samples per call; in LRA's and cosFormer's views 32, or 2 on a CPU."""
    heads: Size = 8
    """Heads of an attention call; models have their own."""
    head_dim: Size = 64
    """Width of a head."""
    causal: bool = False
    """Attend to the past only."""
    features: str = "128,256,512,1024,2048"
    """Linformer's K, for --view=linformer only."""
    layers: Size | None = None
    """Blocks of the model of `inference` and `train`: 4 as in LRA's text task, or 2 in
    Linformer's view."""
    remat: bool = False
    """Keep only each block's input for the backward pass in `train`."""
    repeats: Size = 10
    """Samples of each case; the median, the fastest and the slowest are printed."""
    max_seconds: Positive = 20.0
    """Skip cases in which one call would take longer than this."""
    max_gb: Positive | None = None
    """Memory that a case may need; by default the device's free memory."""
    quick: bool = False
    """Measure the roofline and each case briefly, so the figures are rough. Training
    runs in the accelerator's view take only a few steps."""
    part: str | None = None
    """In the accelerator's view: run only this part, in this process."""
    out: str | None = None
    """Folder, or file ending in .json, for the figures and the picture."""
    picture: bool = True
    """Draw time and memory against the length, next to the figures."""


_TEXT = ModelShape()
# Blocks of RoBERTa-base: two of its twelve, which give the same ratios.
_ROBERTA = ModelShape(2, 768, 12, 3072, positions="learned", pooling="mean")


@dataclasses.dataclass(frozen=True)
class _Defaults:
    attention: str
    lengths: str
    work: str
    model: ModelShape = _TEXT
    cpu_batch: int = 1
    batch: int = 1
    dtypes: str = "float32"
    tables: tuple[published.Published, ...] = ()


_DEFAULTS = {
    "none": _Defaults(
        f"softmax,{FUSED},linear,cosformer,flow,linformer",
        "1K,2K,4K",
        "forward,forward+backward",
    ),
    "lra": _Defaults(
        f"softmax,{FUSED},local,linformer,reformer,sinkhorn,synthesizer,bigbird,"
        "linear,performer,cosformer,flow",
        "1K,2K,3K,4K",
        "train",
        cpu_batch=2,
        batch=32,
        tables=(published.LRA_STEPS, published.LRA_MEMORY),
    ),
    "linformer": _Defaults(
        f"softmax,{FUSED}",
        "512,1K,2K,4K,8K,16K,32K,64K",
        "inference",
        model=_ROBERTA,
        tables=(published.LINFORMER_TIME, published.LINFORMER_MEMORY),
    ),
    "cosformer": _Defaults(
        f"softmax,{FUSED},local,linformer,reformer,sinkhorn,synthesizer,bigbird,"
        "linear,performer,longformer,sparse,cosformer,flow",
        "1K,2K,3K,4K",
        "inference,train",
        cpu_batch=2,
        batch=32,
        tables=(published.COSFORMER_INFERENCE, published.COSFORMER_TRAINING),
    ),
    "decode": _Defaults(
        "softmax,linear,cosformer,flow,norm,retention,lightning,performer,gla,delta,"
        "gated_delta,hgrn",
        "64,256,1K,2K,4K,8K,16K,32K,64K,128K,256K",
        "decode",
    ),
    "accelerator": _Defaults(
        f"{FUSED},softmax[implementation=blocks],linear,cosformer,flow,retention,gla",
        "1K,4K,16K,64K",
        "forward,forward+backward",
        batch=4,
        dtypes="bfloat16",
    ),
}
# In the accelerator's view longer calls are skipped, to stay within its 20 minutes.
_LONGEST_CALL = 2.0


def make_cases(config: BenchmarkConfig, on_cpu: bool) -> list[Case]:
    """The cases requested by a config.

    Raises:
      ValueError: a flag out of range, an unknown name, or work of another view.
    """
    check_types(config, "--")
    if config.view == "accelerator":
        _check_accelerator(config)
    default = _DEFAULTS[config.view]
    model = dataclasses.replace(default.model, remat=config.remat)
    if config.layers is not None:
        model = dataclasses.replace(model, num_layers=config.layers)
    works = default.work if config.work is None else config.work
    works = parse_names("work", works, WORKS)
    for work in works if config.view != "none" else ():
        if work not in default.work.split(","):  # Its tables would compare it.
            only = f"{default.work} for --view={config.view}"
            raise expected("--work", only, repr(work))
    dtypes = default.dtypes if config.dtypes is None else config.dtypes
    lengths = default.lengths if config.lengths is None else config.lengths
    attention = default.attention if config.attention is None else config.attention
    subjects = split_list("attention", attention)
    return [
        Case(
            subject,
            work,
            length,
            dtype,
            config.batch_size or (default.cpu_batch if on_cpu else default.batch),
            config.heads,
            config.head_dim,
            config.causal,
            model=model,
        )
        for work in works
        for dtype in parse_names("dtypes", dtypes, DTYPES)
        for length in parse_lengths("lengths", lengths)
        for subject in [*subjects, *_linformers(config, length)]
    ]


def _check_accelerator(config: BenchmarkConfig) -> None:
    if config.out is None or config.out.endswith(".json"):
        folder = "a folder for --view=accelerator"
        raise expected("--out", folder, repr(config.out))
    if config.part is not None:
        known("--part", config.part, parts.names())


def timing(
    config: BenchmarkConfig, causal: bool, attention: str | None = None
) -> BenchmarkConfig:
    """The settings for one of the time tables of the accelerator's view.

    Args:
      config: the view's settings.
      causal: which form.
      attention: mechanisms to use instead of the view's.
    """
    default = _DEFAULTS["accelerator"]
    return dataclasses.replace(
        config,
        view="none",
        part=None,
        causal=causal,
        attention=attention or config.attention or default.attention,
        lengths=config.lengths or default.lengths,
        work=config.work or default.work,
        dtypes=config.dtypes or default.dtypes,
        batch_size=config.batch_size or default.batch,
        max_seconds=min(config.max_seconds, _LONGEST_CALL),
    )


def linformer_name(features: int) -> str:
    """The name of a Linformer with K features in Linformer's view."""
    return f"linformer[features={features},sharing=layerwise]"


def _linformers(config: BenchmarkConfig, length: int) -> list[str]:
    """The Linformers of Table 3: K up to half of the length."""
    if config.view != "linformer":
        return []
    features = parse_lengths("features", config.features)
    return [linformer_name(size) for size in features if 2 * size <= length]


def published_tables(view: str) -> tuple[published.Published, ...]:
    """The published tables that a view shows with ours."""
    return _DEFAULTS[view].tables
