"""The command: its page, its formats, and its errors of one line."""

from pathlib import Path

import helpers
import pytest

from lra_jax import report
from reports.made_runs import compact, make_run


def test_the_page_shows_all(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "report"
    report.main([str(runs), f"--out={out}"])
    assert "4 runs in" in capsys.readouterr().out
    names = {file.name for file in out.iterdir()}
    assert names == {"report.html", "report.md", "curves-listops.png"}
    parts = ("avg5", "avg6", "Checkpoint rule", "38.00 ± 2.00", "not finished")
    for name in ("report.html", "report.md"):
        text = (out / name).read_text(encoding="utf-8")
        for part in (*parts, "python -m lra_jax.train --task=listops"):
            assert part in text
        assert text.count("curves-listops.png") == (name == "report.md")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count(" | ") for line in rows} == {7, 9}
    assert any("38.00 ± 2.00 |" in line for line in rows)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("empty", "expected run directories"),
        ("only", "expected finished runs"),
        ("broken", "config.json: expected JSON"),
        ("only --format=htm", "--format: expected one of html, md,"),
        ("fine --out=file", "--out: expected a folder that can be written, got"),
        ("fine --out=file --format=csv", "--out: expected a folder that can be"),
    ],
)
def test_errors_are_one_line(tmp_path, monkeypatch, capsys, line, part) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("file").touch()
    make_run(Path("fine", "a"))
    make_run(Path("only", "a"), finished=False)
    make_run(Path("broken", "a"))
    Path("broken", "a", "config.json").write_text("{")
    with pytest.raises(SystemExit) as stop:
        report.main(line.split())
    out, err = capsys.readouterr()
    helpers.assert_one_error(stop.value.code, err, 2, part)
    assert out == ""


def test_the_home_folder_of_every_format(
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A shell leaves the tilde of --out=~/report as it is."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    report.main([str(runs), "--out=~/report", "--format=md,csv"])
    written = {file.name for file in (tmp_path / "home" / "report").iterdir()}
    tables = {"report.csv", "report-settings.csv"}
    assert written == {"report.md", "curves-listops.png", *tables}
    assert not (tmp_path / "~").exists()
    assert str(tmp_path / "home" / "report" / "report.csv") in capsys.readouterr().out


def test_runs_that_are_not_shown_are_counted(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table has no room for a list of them."""
    make_run(runs / "again", 31.0, compact("flow"))
    report.main([str(runs), f"--out={tmp_path / 'out'}", "--format=csv"])
    end = "report-settings.csv; not shown: 1 not finished, 1 repeated\n"
    assert capsys.readouterr().out.endswith(end)
