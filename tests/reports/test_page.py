"""A page needs nothing else, and no text in it is taken for more than text."""

import base64
import json
from html.parser import HTMLParser

import numpy as np
import pytest
from markdown_it import MarkdownIt

from lra_jax.reports.charts import Chart, Line, Panel
from lra_jax.reports.page import Items, Page, Section
from lra_jax.reports.table import Table

HOSTILE = "<img src=x> & `a` | ![i](http://h/p.png)\n# *b* __c__ ~~d~~ [e]: f \\"


class Reader(HTMLParser):
    """Text, cells, tags and attributes; every element must be closed."""

    def __init__(self, text):
        super().__init__()
        self.attributes, self.open, self.cells = [], [], []
        self.text, self.tags = "", set()
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        self.tags.add(tag)
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag):
        assert tag == "img" or self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


def full_page(folder, text=HOSTILE):
    """A page with every kind of part, each showing the same text."""
    page = Page(text, folder, {"command": "a"})
    table = Table((text, "number"), [(text, 1.5), ("x", text)], ours=1)
    page.add(Section(text, [text, Items([text]), Items([text], True), table]))
    panel = Panel([Line("a", [1, 2], [3, 4])])
    values = np.array([1.23456, 2, np.inf, np.nan])
    page.add(Chart("picture", [panel], text, {"values": values}))
    return page


def test_html_needs_nothing_else(tmp_path):
    file = full_page(tmp_path).write("index")
    text = file.read_text(encoding="utf-8")
    reader = Reader(text)
    sources = [value for name, value in reader.attributes if name == "src"]
    assert len(sources) == 1 and sources[0].startswith("data:image/png;base64,")
    assert base64.b64decode(sources[0][22:]) == (tmp_path / "picture.png").read_bytes()
    assert not {"href", "onload"} & {name for name, _ in reader.attributes}
    assert "@import" not in text and "url(" not in text


def test_html_escapes_every_part(tmp_path):
    text = full_page(tmp_path).html()
    reader = Reader(text)
    assert text.count("<img") == 1
    assert reader.cells == [HOSTILE, "number", HOSTILE, "1.5", "x", HOSTILE]


def test_markdown_escapes_every_part(tmp_path):
    """A reader of Markdown shows each text as it is, on one line."""
    reader = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    text = " ".join(HOSTILE.split())
    markdown = full_page(tmp_path).markdown()
    html = Reader(reader.render(markdown))
    assert html.cells == [text, "number", text, "1.5", "x", text]
    assert html.text.count(text) == 9
    images = [value for name, value in html.attributes if name == "src"]
    assert images == ["picture.png"]
    assert not {"href", "onload"} & {name for name, _ in html.attributes}
    assert {"em", "strong", "s"}.isdisjoint(html.tags)
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len(rows) == 4 and len({len(row) for row in rows}) == 1


@pytest.mark.parametrize(
    "plain", ["linformer[features=128]", "softmax_fused", "T^1.02", "3 (2)", "-"]
)
def test_markdown_leaves_plain_text_alone(plain):
    page = Page("a")
    page.add(Table(("b",), [(plain,)]))
    assert f"| {plain} " in page.markdown()


def test_numbers_are_beside_the_picture(tmp_path):
    full_page(tmp_path)
    text = (tmp_path / "picture.json").read_text()
    stored = json.loads(text)
    assert stored["command"] == "a" and stored["caption"] == HOSTILE
    assert stored["data"] == {"values": [1.235, 2.0, None, None]}
    assert "NaN" not in text and "Infinity" not in text, "not JSON for other programs"


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--out: expected a folder .*, got .*file"):
        Page("a", tmp_path / "file")
