"""The cases to measure: one mechanism at one length, in one dtype, for one work.

Nothing here imports jax: ``--help`` must be quick.
"""

import dataclasses
import re
from typing import Any, Literal

from lra_jax.errors import expected, known

WORKS = ("forward", "forward+backward", "decode", "inference", "train")
"""forward, forward+backward: one attention call, and its gradients with respect to
query, key, value, gates and parameters of its own. decode: one token after ``length``
others. inference, train: a whole model, and its training step."""
MODEL_WORKS = ("inference", "train")
DTYPES = ("float32", "bfloat16", "float16")
ROWS = ("whole", "padded")
"""whole: no mask. padded: the first and the last eighth of each sequence is padding."""
FUSED = "softmax-fused"

_SUBJECT = re.compile(r"(?P<name>[^\[\]]+?)(\[(?P<options>[^\[\]]*)\])?$")


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """A sequence classifier around the mechanism; the defaults are LRA's for text.

    Source: google-research/long-range-arena, lra_benchmarks/text_classification/
    configs/base_tc_config.py: 4 layers, 256 wide, 4 heads, MLP 1024, CLS pooling, 256
    bytes and padding.
    """

    num_layers: int = 4
    embed_dim: int = 256
    num_heads: int = 4
    mlp_dim: int = 1024
    vocab_size: int = 257
    num_classes: int = 2
    pooling: Literal["mean", "cls"] = "cls"
    positions: Literal["learned", "sinusoidal"] = "sinusoidal"
    remat: bool = False


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing to time.

    Attributes:
      attention: a registered name, "softmax-fused" or "package.module:function",
        with options in brackets: "linformer[features=128]".
      work: one of `WORKS`.
      length: tokens T.
      dtype: dtype of the inputs, or of the model's computation.
      batch_size, heads, head_dim: B, N and H; a model has its own heads.
      causal: attention to the past only.
      rows: one of `ROWS`, for an attention call.
      model: the model of "inference" and "train".
    """

    attention: str
    work: str
    length: int
    dtype: str = "float32"
    batch_size: int = 1
    heads: int = 8
    head_dim: int = 64
    causal: bool = False
    rows: str = "whole"
    model: ModelShape = ModelShape()

    @property
    def name(self) -> str:
        """The mechanism without its options."""
        return split_subject(self.attention)[0]

    @property
    def line(self) -> tuple[str, str, str]:
        """The settings shared by the cases of one line in the picture."""
        return self.attention, self.work, self.dtype

    def to_dict(self) -> dict[str, Any]:
        """The case as JSON, with the model only if there is one."""
        values = dataclasses.asdict(self)
        unused = (
            ("heads", "head_dim", "rows") if self.work in MODEL_WORKS else ("model",)
        )
        return {name: value for name, value in values.items() if name not in unused}


def form(causal: bool, rows: str = "whole") -> str:
    """The form of a case in words, such as "causal, padded"."""
    words = "causal" if causal else "full"
    return words if rows == "whole" else f"{words}, {rows}"


def split_subject(text: str) -> tuple[str, str]:
    """Splits ``"linformer[features=128]"`` into ``("linformer", "features=128")``.

    Raises:
      ValueError: unclosed brackets, or no name.
    """
    match = _SUBJECT.match(text.strip())
    if match is None:
        names = "names such as linear or linformer[features=128]"
        raise expected("--attention", names, repr(text))
    return match["name"].strip(), match["options"] or ""


def split_list(flag: str, text: str) -> list[str]:
    """The parts between commas, ignoring commas in brackets.

    Raises:
      ValueError: an empty list, an empty part or a repeated one.
    """
    parts = [part.strip() for part in re.split(r",(?![^\[\]]*\])", text)]
    if not all(parts) or len(set(parts)) != len(parts):
        raise expected(f"--{flag}", "different values separated by commas", repr(text))
    return parts


def parse_names(flag: str, text: str, names: tuple[str, ...]) -> list[str]:
    """A list of known values; ``ValueError`` with the nearest name for others."""
    return [known(f"--{flag}", part, names) for part in split_list(flag, text)]


def parse_lengths(flag: str, text: str) -> list[int]:
    """Parses ``"1024,4K"`` to ``[1024, 4096]``, in increasing order.

    Raises:
      ValueError: a part that is not a positive integer.
    """
    lengths = []
    for part in split_list(flag, text):
        digits, unit = (part[:-1], 1024) if part[-1] in "kK" else (part, 1)
        if not digits.isdecimal() or len(digits) > 9 or int(digits) < 1:
            numbers = "positive integers such as 1024,2048 or 1K,2K"
            raise expected(f"--{flag}", numbers, repr(part))
        lengths.append(int(digits) * unit)
    return sorted(set(lengths))
