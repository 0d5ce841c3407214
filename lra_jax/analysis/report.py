"""An analysis on disk: pictures, the data behind each, one page that holds it all."""

import base64
import html
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lra_jax import plotting

__all__ = ["Report"]

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 sans-serif; max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem; color: #111; background: #fff; }}
figure {{ margin: 2rem 0; }}
figure img {{ max-width: 100%; border: 1px solid #ddd; }}
figcaption {{ color: #333; }}
table {{ border-collapse: collapse; margin: 1rem 0; }}
td, th {{ padding: .2rem .7rem; border-bottom: 1px solid #ccc; text-align: right; }}
td:first-child, th:first-child {{ text-align: left; }}
code, .text {{ font-family: monospace; overflow-wrap: anywhere; }}
</style>
<h1>{title}</h1>
{body}
<h2>Made by</h2>
<table>{made_by}</table>
</html>
"""


class Report:
    """Collects an analysis; `write` makes the page, last of all.

    Args:
      folder: made if need be. Files of the same names are replaced.
      title: of the page.
      made_by: what to say about command, versions and machine; goes into every file.

    Raises:
      ValueError: the folder cannot be written.
    """

    def __init__(self, folder: str | Path, title: str, made_by: dict[str, Any]):
        plotting.check_available()
        self.folder = Path(folder).expanduser()
        self.title = title
        self.made_by = made_by
        self._body: list[str] = []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"--out={self.folder} cannot be written: {error.strerror}"
            ) from error

    def text(self, words: str) -> None:
        """A paragraph."""
        self._body.append(f"<p>{html.escape(words)}</p>")

    def heading(self, words: str) -> None:
        """A heading of a section."""
        self._body.append(f"<h2>{html.escape(words)}</h2>")

    def markup(self, markup: str) -> None:
        """HTML as it is; the caller has escaped what is in it."""
        self._body.append(markup)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A table; the first column is text, the others are numbers."""
        lines = [_row("th", head), *(_row("td", row) for row in rows)]
        self._body.append(f"<table>{''.join(lines)}</table>")

    def figure(self, name: str, figure: Any, caption: str, data: Any) -> None:
        """A picture ``name.png``, and its numbers in ``name.json``."""
        file = self.folder / f"{name}.png"
        plotting.save(figure, file)
        values = {**self.made_by, "caption": caption, "data": data}
        _replace(self.folder / f"{name}.json", _readable(values) + "\n")
        image = base64.b64encode(file.read_bytes()).decode()
        self._body.append(
            f'<figure><img alt="{html.escape(caption)}" '
            f'src="data:image/png;base64,{image}"><figcaption>'
            f"{html.escape(caption)}</figcaption></figure>"
        )

    def write(self) -> Path:
        """Writes the page and returns its path."""
        made_by = "".join(_row("td", row) for row in _flat(self.made_by))
        page = _PAGE.format(
            title=html.escape(self.title),
            body="\n".join(self._body),
            made_by=made_by,
        )
        file = self.folder / "index.html"
        _replace(file, page)
        return file


def _row(tag: str, cells: Sequence[Any]) -> str:
    inner = "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells)
    return f"<tr>{inner}</tr>"


def _flat(values: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for name, value in values.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v}" for k, v in value.items())
        rows.append((name, str(value)))
    return rows


def _plain(value: Any) -> Any:
    """numpy as JSON, in the four digits that a figure can show."""
    if isinstance(value, np.ndarray):
        return _rounded(value.tolist())
    if isinstance(value, np.generic):
        return _rounded(value.item())
    raise TypeError(f"not JSON: {type(value).__name__}")


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _readable(values: dict[str, Any], depth: int = 3, indent: str = "") -> str:
    """JSON with a line for each entry of the outer dicts, and no line for a number."""
    if depth == 0 or not isinstance(values, dict) or not values:
        return json.dumps(values, default=_plain)
    inner = indent + " "
    lines = (
        f"{inner}{json.dumps(str(name))}: {_readable(value, depth - 1, inner)}"
        for name, value in values.items()
    )
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def _replace(file: Path, text: str) -> None:
    """Writes a whole file or none."""
    beside = file.with_suffix(file.suffix + ".part")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, file)
