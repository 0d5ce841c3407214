"""A hook of mkdocs: pages of the site that lie outside this folder.

README is its first page; CONTRIBUTING, CHANGELOG, the notebooks and the figures of
results/ lie outside docs/; the reference is made of docstrings, a page a subject.
"""

import re
from pathlib import Path
from typing import Any

import jupytext
from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

from lra_jax.attention.registry import MECHANISMS

ROOT = Path(__file__).parents[1]
REPOSITORY = "https://github.com/lra-jax/lra_jax"

REFERENCE = {
    "models": (
        *("models.config", "models.attention", "models.encoder"),
        *("models.classifier", "models.matching", "models.tokens"),
        *("models.language", "models.generation", "models.decoding"),
        *("models.stream", "models.short_conv"),
        *("models.product_keys", "models.norms"),
        *("models.saved", "models.raw", "models.arrays", "models.pretrained"),
    ),
    "configs": ("configs.base", "configs"),
    "training": ("train", "training.restore", "tasks.task", "data.pipeline"),
    "analysis": (
        *("analysis.residual", "analysis.bound", "analysis.paths"),
        *("analysis.spectrum", "analysis.projection"),
        *("analysis.capture", "analysis.collapse", "analysis.maps"),
    ),
}

_SHARED = ("inputs", "masking", "packed")

_IMPORTS = """The examples assume these imports, and the names of their module:

```python
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
```"""


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages and pictures from outside, and the reference."""
    pages = {
        "index.md": (ROOT / "README.md").read_text("utf-8"),
        "CONTRIBUTING.md": (ROOT / "CONTRIBUTING.md").read_text("utf-8"),
        "CITATION.md": "```yaml\n" + (ROOT / "CITATION.cff").read_text("utf-8") + "```",
        "CHANGELOG.md": (ROOT / "CHANGELOG.md").read_text("utf-8"),
        "notebooks/index.md": (ROOT / "notebooks" / "README.md").read_text("utf-8"),
    }
    for source in sorted((ROOT / "notebooks").glob("[0-9]_*.py")):
        pages[f"notebooks/{source.stem}.md"] = _notebook(source)
    for name, modules in REFERENCE.items():
        pages[f"reference/{name}.md"] = _reference(name, modules)
    mechanisms = (m.module.removeprefix("lra_jax.") for m in MECHANISMS.values())
    pages["reference/attention.md"] = _reference(
        "attention",
        ("attention", *mechanisms, *(f"attention.{x}" for x in _SHARED)),
    )
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    for picture in sorted((ROOT / "results").rglob("*.png")):
        path = picture.relative_to(ROOT).as_posix()
        files.append(File.generated(config, path, abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links as they are between files of the site."""
    markdown = re.sub(r"\]\((?:\.\./)+(?=results/|CONTRIBUTING)", "](", markdown)
    markdown = re.sub(r"\]\(docs/", "](", markdown)
    # Code, data and the tables of results are read in the repository.
    folders = "lra_jax|benchmarks|tests|results"
    files = rf"\]\((?:\.\./)?((?:{folders})/[^)]+\.(?:py|json|md))\)"
    markdown = re.sub(files, rf"]({REPOSITORY}/blob/main/\1)", markdown)
    markdown = markdown.replace("](../README.md", "](index.md")
    notebooks = r"\]\((?:\.\./)?notebooks/README.md\)"
    markdown = re.sub(notebooks, "](notebooks/index.md)", markdown)
    markdown = markdown.replace("](CITATION.cff)", "](CITATION.md)")
    return re.sub(r"\]\(([0-9]_\w+)\.ipynb\)", r"](\1.md)", markdown)


def _notebook(source: Path) -> str:
    """A notebook as a page, code cells as blocks of code."""
    parts = []
    for cell in jupytext.reads(source.read_text("utf-8"), fmt="py:percent").cells:
        code = cell.cell_type == "code"
        text = f"```python\n{cell.source}\n```" if code else _formulas(cell.source)
        parts.append(text)
    return "\n\n".join(parts)


def _formulas(text: str) -> str:
    """TeX as MathML, which browsers show without a script or a network."""
    display = {True: "block", False: "inline"}

    def convert_match(match: re.Match[str]) -> str:
        block = match[1] is not None
        tex = " ".join((match[1] or match[2]).split())
        return convert(tex, display=display[block])

    pattern = r"\$\$(.+?)\$\$|\$([^$]+?)\$"
    return re.sub(pattern, convert_match, text, flags=re.DOTALL)


def _reference(name: str, modules: tuple[str, ...]) -> str:
    parts = [f"# {name.capitalize()}", _IMPORTS]
    for module in modules:
        parts.append(f"## lra_jax.{module}\n\n::: lra_jax.{module}")
    return "\n\n".join(parts)
