"""A page as self-contained HTML that needs no network, and as Markdown.

A page is a list of parts. Two templates lay them out, and both escape every text that
they receive, whether it is ours or from a file that somebody else wrote.
"""

import base64
import contextlib
import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
from markupsafe import Markup

from lra_jax import progress
from lra_jax.errors import writable
from lra_jax.files import expand_home, write_text
from lra_jax.reports.charts import Chart
from lra_jax.reports.table import Table, to_markdown


class Picture(NamedTuple):
    """A PNG in base64, its file's name without the suffix, a description, and its width
    in pixels."""

    name: str
    base64: str
    caption: str
    width: int


class Items(NamedTuple):
    """A list, of plain text or of commands."""

    lines: Sequence[str]
    are_commands: bool = False


Part = str | Chart | Table | Items
"""A part of a page; a ``str`` is a paragraph."""


class Section(NamedTuple):
    """A heading and what is below it."""

    heading: str
    parts: Sequence[Part]


class Page:
    """Collects sections and other parts in order; call `write` last.

    Args:
      title: title of the page.
      folder: folder for pages and pictures; created if missing. Files of the same names
        are replaced. None for a page that is only printed.
      made_by: command, versions and machine, for the JSON next to each picture.

    Raises:
      ValueError: the folder cannot be written.
    """

    def __init__(
        self,
        title: str,
        folder: str | Path | None = None,
        made_by: Mapping[str, Any] | None = None,
    ):
        self.title = title
        self.made_by = dict(made_by or {})
        self._parts: list[tuple[str, Any]] = []
        self._folder = expand_home(folder or ".", "--out")
        around = (self._folder, *self._folder.parents)
        self._made = [folder for folder in around if not folder.exists()]
        with writable("--out", "a folder", self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)

    def discard(self) -> None:
        """Removes the folders that it made, if nothing was written there."""
        for folder in self._made:
            with contextlib.suppress(OSError):
                folder.rmdir()

    def add(self, *parts: Section | Part) -> None:
        """Adds parts; a chart is written, as ``NAME.png`` and its data as
        ``NAME.json``."""
        for part in parts:
            match part:
                case Section():
                    self._parts.append(("heading", part.heading))
                    self.add(*part.parts)
                case Chart():
                    self._parts.append(("picture", self._write_chart(part)))
                case Table():
                    self._parts.append(("table", part))
                case Items():
                    self._parts.append(("items", part))
                case _:
                    self._parts.append(("text", part))

    def _write_chart(self, chart: Chart) -> Picture:
        progress.say(f"drawing {chart.name}.png ...")
        drawn = chart.save(self._folder / f"{chart.name}.png")
        if chart.data is not None:
            values = {**self.made_by, "caption": chart.caption, "data": chart.data}
            write_text(self._folder / f"{chart.name}.json", _readable(values) + "\n")
        encoded = base64.b64encode(drawn).decode()
        return Picture(chart.name, encoded, chart.caption, chart.width)

    def html(self) -> str:
        """The page, with its pictures embedded."""
        return self._render("page.html")

    def markdown(self) -> str:
        """The same as Markdown; its pictures are separate files."""
        return self._render("page.md")

    def write(self, name: str, kinds: Sequence[str] = ("html", "md")) -> Path:
        """Writes ``name.html`` and ``name.md``, or one; returns the first path."""
        formats = {"html": self.html, "md": self.markdown}
        files = [self._folder / f"{name}.{kind}" for kind in kinds]
        for kind, file in zip(kinds, files, strict=True):
            write_text(file, formats[kind]())
        return files[0]

    def _render(self, template: str) -> str:
        environment = _environment(template.endswith(".html"))
        page = environment.get_template(template)
        return page.render(title=self.title, parts=self._parts)


@functools.cache
def _environment(is_html: bool) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("lra_jax.reports"),
        autoescape=is_html,
        # Markdown escaping, made as hard to forget as HTML escaping.
        finalize=None if is_html else to_markdown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["code"] = _code
    return environment


def _code(text: str) -> Markup:
    """A code span, fenced with more backticks than the text has in a row."""
    words = " ".join(text.split())
    fence = "`" * (1 + max(map(len, re.findall("`+", words)), default=0))
    space = " " if "`" in words else ""
    return Markup(f"{fence}{space}{words}{space}{fence}")


def _plain(value: Any) -> Any:
    """numpy values as JSON, with the four digits that a figure can show."""
    if isinstance(value, np.ndarray | np.generic):
        return _round(value.tolist())
    raise TypeError(f"not JSON: {type(value).__name__}")


def _round(value: Any) -> Any:
    if isinstance(value, list):
        return [_round(item) for item in value]
    if not isinstance(value, float):
        return value
    # JSON has no infinities.
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _readable(values: Any, depth: int = 3, indent: str = "") -> str:
    """JSON with one line per entry of the outer dicts, but not one per number."""
    if depth == 0 or not isinstance(values, dict) or not values:
        return json.dumps(values, default=_plain, allow_nan=False)
    inner = indent + " "
    lines = (
        f"{inner}{json.dumps(str(name))}: {_readable(value, depth - 1, inner)}"
        for name, value in values.items()
    )
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
