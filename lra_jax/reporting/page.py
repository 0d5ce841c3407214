"""A report as one HTML page that needs nothing else, and as markdown."""

import html
from collections.abc import Sequence

from lra_jax.configs import TASKS
from lra_jax.reporting import charts, tables
from lra_jax.reporting.collect import Group
from lra_jax.reporting.tables import Table

_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #ffffff; --soft: #667;
  --line: #d8d8de; --ours: #eef4fb; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8ea; --paper: #16171a;
  --soft: #9aa; --line: #34363c; --ours: #1c2633; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 75rem; color: var(--ink);
  background: var(--paper); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
p, li { max-width: 48rem; }
.note { color: var(--soft); font-size: .87rem; }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-size: .84rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
tr:last-child td { border-bottom: 0; }
th { white-space: nowrap; }
td:first-child { min-width: 9rem; }
td:last-child { min-width: 16rem; }
.number { text-align: right; }
td.number { min-width: 4.5rem; }
.ours { background: var(--ours); }
svg { display: block; width: 100%; max-width: 45rem; height: auto; margin: .75rem 0; }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft); }
@media (max-width: 40rem) { svg text { font-size: 19px; } }
svg .grid { stroke: var(--line); }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.2rem; margin: 0; padding: 0;
  list-style: none; font-size: .84rem; }
.legend svg { display: inline-block; width: 28px; height: 10px; margin: 0 .4rem 0 0; }
code { overflow-wrap: anywhere; font-size: .82rem; }
"""


def to_html(groups: Sequence[Group], notes: Sequence[str]) -> str:
    """The page.

    Args:
      groups: finished runs.
      notes: runs that are not shown, a line each.
    """
    parts = [
        f"<h1>{_TITLE}</h1>",
        *(f"<p>{html.escape(p)}</p>" for p in _intro(groups)),
    ]
    for task, members in by_task(groups).items():
        parts.append(f"<h2>{html.escape(task)}</h2>")
        parts.append(_html_table(tables.task_table(task, members)))
        curves = learning_curves(members)
        if curves:
            parts.append(charts.chart(f"Learning curves of {task}", curves))
            parts.append(_legend(curves))
    parts.append("<h2>All tasks</h2>")
    parts.append(f"<p>{html.escape(tables.AVERAGES)}</p>")
    parts.append(_html_table(tables.averages_table(groups)))
    parts.append("<h2>How to repeat</h2><ul>")
    parts += [f"<li><code>{html.escape(line)}</code></li>" for line in commands(groups)]
    parts.append("</ul>")
    if notes:
        parts.append("<h2>Not shown</h2><ul>")
        parts += [f"<li class=note>{html.escape(note)}</li>" for note in notes]
        parts.append("</ul>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_TITLE}</title><style>{_STYLE}</style></head>"
        f"<body>{chr(10).join(parts)}</body></html>\n"
    )


def to_markdown(groups: Sequence[Group], notes: Sequence[str]) -> str:
    """The same tables as markdown; curves are in the page alone."""
    parts = [f"# {_TITLE}", *_intro(groups)]
    for task, members in by_task(groups).items():
        parts += [f"## {task}", _markdown_table(tables.task_table(task, members))]
    parts += ["## All tasks", tables.AVERAGES]
    parts += [_markdown_table(tables.averages_table(groups)), "## How to repeat"]
    parts.append("\n".join(f"- `{line}`" for line in commands(groups)))
    if notes:
        parts += ["## Not shown", "\n".join(f"- {note}" for note in notes)]
    return "\n\n".join(parts) + "\n"


def by_task(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """The groups of each task, tasks in LRA's order."""
    tasks = sorted({g.config.task for g in groups}, key=list(TASKS).index)
    return {task: [g for g in groups if g.config.task == task] for task in tasks}


def learning_curves(groups: Sequence[Group]) -> list[charts.Curve]:
    """Validation accuracy of each group that has any, in percent."""
    curves = []
    for group in groups:
        seeds = [
            [
                (float(m["step"]), 100 * m["accuracy"])
                for m in run.metrics
                if m["split"] == "valid" and isinstance(m.get("accuracy"), float)
            ]
            for run in group.runs
        ]
        if all(seeds):
            curves.append(charts.Curve(tables.model_name(group, groups), seeds))
    return curves


def commands(groups: Sequence[Group]) -> list[str]:
    """The command of every run, with the versions and the commit it ran with."""
    lines = []
    for group in groups:
        for result in group.results:
            versions = result.get("versions") or {}
            commit = str(result.get("commit") or "unknown")[:12]
            command = result.get("command") or "lra_jax.train.run(config)"
            lines.append(
                f"{command}  # jax {versions.get('jax', '?')}, commit {commit}"
            )
    return lines


_TITLE = "Long-Range Arena: report of runs"


def _intro(groups: Sequence[Group]) -> list[str]:
    count = sum(len(group.runs) for group in groups)
    return [
        f"{count} finished runs, {len(groups)} of different settings. Accuracies are "
        "in percent of the whole test split; ± is the sample standard deviation over "
        "seeds. For a single seed, se is the standard error from the number of test "
        "examples alone, which says nothing about other seeds.",
        tables.CHECKPOINTS,
        "Steps/s is the median in training, without evaluations and compilation. Peak "
        "memory says what it counts: of a device, or of the whole process.",
    ]


def _html_table(table: Table) -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=number' if i in table.numeric else ''}>"
            f"{html.escape(cell)}</{tag}>"
            for i, cell in enumerate(row)
        )

    rows = [
        f"<tr{' class=ours' if i in table.ours else ''}>{cells(row, 'td')}</tr>"
        for i, row in enumerate(table.rows)
    ]
    return (
        f'<div class="wide"><table><thead><tr>{cells(table.header, "th")}</tr></thead>'
        f"<tbody>{chr(10).join(rows)}</tbody></table></div>"
    )


def _markdown_table(table: Table) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rule = ["---:" if i in table.numeric else "---" for i in range(len(table.header))]
    return "\n".join([line(table.header), line(rule), *map(line, table.rows)])


def _legend(curves: Sequence[charts.Curve]) -> str:
    items = []
    for index, curve in enumerate(curves):
        colour, dashes = charts.style(index)
        dash = f' stroke-dasharray="{dashes}"' if dashes else ""
        items.append(
            f'<li><svg viewBox="0 0 28 10"><line x1="0" y1="5" x2="28" y2="5" '
            f'stroke="{colour}" stroke-width="3"{dash}/></svg>'
            f"{html.escape(curve.name)}</li>"
        )
    return f'<ul class="legend">{"".join(items)}</ul>'
