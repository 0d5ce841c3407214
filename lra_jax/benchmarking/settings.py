"""The flags of ``python -m lra_jax.benchmark``, and the cases that they ask for."""

import dataclasses
from typing import Any, Literal

from lra_jax.benchmarking import parts
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

ViewName = Literal["none", "lra", "linformer", "cosformer", "decode", "accelerator"]


@dataclasses.dataclass(frozen=True)
class BenchmarkConfig:
    """The measurements to make, on one device. Unset flags have the view's values."""

    view: ViewName = "none"
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


_PAPERS = "local,linformer,reformer,sinkhorn,synthesizer,bigbird,linear,performer"
_VIEWS: dict[str, dict[str, Any]] = {
    "none": dict(
        attention=f"softmax,{FUSED},linear,cosformer,flow,linformer",
        lengths="1K,2K,4K",
        work="forward,forward+backward",
    ),
    "lra": dict(
        attention=f"softmax,{FUSED},{_PAPERS},cosformer,flow",
        lengths="1K,2K,3K,4K",
        work="train",
        batch_size=32,
    ),
    "linformer": dict(
        attention=f"softmax,{FUSED}",
        lengths="512,1K,2K,4K,8K,16K,32K,64K",
        work="inference",
    ),
    "cosformer": dict(
        attention=f"softmax,{FUSED},{_PAPERS},longformer,sparse,cosformer,flow",
        lengths="1K,2K,3K,4K",
        work="inference,train",
        batch_size=32,
    ),
    "decode": dict(
        attention="softmax,linear,cosformer,flow,norm,retention,lightning,performer,"
        "gla,delta,gated_delta,hgrn",
        lengths="64,256,1K,2K,4K,8K,16K,32K,64K,128K,256K",
        work="decode",
    ),
    "accelerator": dict(
        attention=f"{FUSED},softmax[implementation=blocks],linear,cosformer,flow,"
        "retention,gla",
        lengths="1K,4K,16K,64K",
        work="forward,forward+backward",
        dtypes="bfloat16",
        batch_size=4,
    ),
}
_CPU_BATCH = 2  # At most, on a CPU.
# In Linformer's view, blocks of RoBERTa-base: two of its twelve, which give the same
# ratios.
_ROBERTA = ModelShape(2, 768, 12, 3072, positions="learned", pooling="mean")
# In the accelerator's view longer calls are skipped, to stay within its 20 minutes.
_LONGEST_CALL = 2.0


def complete(config: BenchmarkConfig, on_cpu: bool) -> dict[str, Any]:
    """The flags that a view has defaults for, with these for unset ones."""
    defaults = {"dtypes": "float32", "batch_size": 1} | _VIEWS[config.view]
    if on_cpu:
        defaults["batch_size"] = min(defaults["batch_size"], _CPU_BATCH)
    flags = {name: getattr(config, name) for name in defaults}
    return defaults | {name: x for name, x in flags.items() if x is not None}


def make_cases(config: BenchmarkConfig, on_cpu: bool) -> list[Case]:
    """The cases requested by a config.

    Raises:
      ValueError: a flag out of range, an unknown name, or work of another view.
    """
    check_types(config, "--")
    if config.view == "accelerator":
        _check_accelerator(config)
    view = complete(config, on_cpu)
    model = _ROBERTA if config.view == "linformer" else ModelShape()
    layers = config.layers or model.num_layers
    model = dataclasses.replace(model, remat=config.remat, num_layers=layers)
    works = parse_names("work", view["work"], WORKS)
    allowed = _VIEWS[config.view]["work"]
    for work in works if config.view != "none" else ():
        if work not in allowed.split(","):  # Its tables would compare it.
            raise expected("--work", f"{allowed} for --view={config.view}", repr(work))
    subjects = split_list("attention", view["attention"])
    return [
        Case(
            subject,
            work,
            length,
            dtype,
            view["batch_size"],
            config.heads,
            config.head_dim,
            config.causal,
            model=model,
        )
        for work in works
        for dtype in parse_names("dtypes", view["dtypes"], DTYPES)
        for length in parse_lengths("lengths", view["lengths"])
        for subject in [*subjects, *_linformers(config, length)]
    ]


def _check_accelerator(config: BenchmarkConfig) -> None:
    if config.out is None or config.out.endswith(".json"):
        folder = "a folder for --view=accelerator"
        raise expected("--out", folder, repr(config.out))
    if config.part is not None:
        known("--part", config.part, parts.names())


def timing(config: BenchmarkConfig, causal: bool) -> BenchmarkConfig:
    """The settings for one of the time tables of the accelerator's view."""
    values = complete(config, on_cpu=False)
    longest = min(config.max_seconds, _LONGEST_CALL)
    common: Any = {"view": "none", "part": None, "causal": causal}
    return dataclasses.replace(config, **common, **values, max_seconds=longest)


def linformer_name(features: int) -> str:
    """The name of a Linformer with K features in Linformer's view."""
    return f"linformer[features={features},sharing=layerwise]"


def _linformers(config: BenchmarkConfig, length: int) -> list[str]:
    """The Linformers of Table 3: K up to half of the length."""
    if config.view != "linformer":
        return []
    features = parse_lengths("features", config.features)
    return [linformer_name(size) for size in features if 2 * size <= length]
