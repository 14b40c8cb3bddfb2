"""A page of headings, paragraphs, tables, charts and quoted text, written as Markdown or as HTML."""

import html
import re
from dataclasses import dataclass
from typing import Any

from solera.report.html import UPLOT, filled, part


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Link:
    text: str
    target: str


@dataclass(frozen=True)
class Table:
    """Columns and rows. The first `words` columns are text, the others numbers."""

    head: tuple[str, ...]
    rows: list[tuple[str | Link, ...]]
    words: int = 1


@dataclass(frozen=True)
class Charts:
    """Charts: the name of a picture file, for Markdown, and the data of the same charts, for HTML."""

    file: str
    says: str
    data: dict[str, Any]


@dataclass(frozen=True)
class Quoted:
    text: str


Block = Heading | Paragraph | Table | Charts | Quoted


def markdown(title: str, blocks: list[Block]) -> str:
    return "\n\n".join([f"# {_md(title)}", *map(_markdown, blocks)]) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {_md(text)}"
        case Paragraph(text):
            return _md(text)
        case Charts(file, says, _):
            return f"![{_md(says)}]({file})"
        case Quoted(text):
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
            return f"{fence}\n{text.rstrip()}\n{fence}"
        case Table(head, rows, words):
            rule = ["---" if column < words else "---:" for column in range(len(head))]
            return "\n".join(f"| {' | '.join(map(_md, row))} |" for row in (head, *rows)).replace(
                "\n", f"\n| {' | '.join(rule)} |\n", 1
            )


def _md(text: str | Link) -> str:
    if isinstance(text, Link):
        return f"[{_md(text.text)}]({text.target})"
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", text).replace("\n", " ")


def page(title: str, blocks: list[Block]) -> str:
    """The blocks as one self-contained page."""
    data = {"charts": [], "names": [], "uplot": UPLOT}
    for block in blocks:
        if isinstance(block, Charts):
            data |= block.data
    body = "\n".join(map(_html, blocks))
    parts = {"title": html.escape(title), "body": body, "sweep": part("sweep.js")}
    return filled(part("sweep.html"), parts, data)


def _html(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{html.escape(text)}</h{level}>"
        case Paragraph(text):
            return f"<p>{html.escape(text)}</p>"
        case Charts():
            return '<div id="legend"></div>\n<div id="charts" class="panels"></div>'
        case Quoted(text):
            return f'<div class="card scroll"><pre class="text">{html.escape(text)}</pre></div>'
        case Table(head, rows, words):
            lines = [_html_row("th", head, words), *(_html_row("td", row, words) for row in rows)]
            return f'<div class="card scroll"><table>{"".join(lines)}</table></div>'


def _html_row(tag: str, cells: tuple[str | Link, ...], words: int) -> str:
    opened = [f"<{tag}>" if column < words else f'<{tag} class="figure">' for column in range(len(cells))]
    return f"<tr>{''.join(f'{start}{_inside(cell)}</{tag}>' for start, cell in zip(opened, cells, strict=True))}</tr>"


def _inside(cell: str | Link) -> str:
    if isinstance(cell, Link):
        return f'<a href="{html.escape(cell.target)}">{html.escape(cell.text)}</a>'
    return html.escape(cell)
