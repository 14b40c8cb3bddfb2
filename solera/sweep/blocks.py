"""A page of headings, paragraphs, tables, a picture and quoted text, written as Markdown or as HTML."""

import html
import re
from dataclasses import dataclass

from solera.report.html import part


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
    """Columns and rows; the first `words` columns are words, the others figures."""

    head: tuple[str, ...]
    rows: list[tuple[str | Link, ...]]
    words: int = 1


@dataclass(frozen=True)
class Picture:
    """A file beside the page, and the same picture as a data URL for a page that holds all within itself."""

    file: str
    inline: str
    says: str


@dataclass(frozen=True)
class Quoted:
    text: str


Block = Heading | Paragraph | Table | Picture | Quoted


def markdown(title: str, blocks: list[Block]) -> str:
    return "\n\n".join([f"# {_md(title)}", *map(_markdown, blocks)]) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {_md(text)}"
        case Paragraph(text):
            return _md(text)
        case Picture(file, _, says):
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


PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<style>
{style}
main img {{ width: 100%; background: #fff; }}
main p {{ margin: 0 0 8px; }}
main h2 {{ margin: 26px 0 10px; }}
main h3 {{ margin: 14px 0 6px; }}
main .scroll {{ margin-bottom: 14px; }}
</style>
</head>
<body>
<header class="top"><div class="wide"><div><p class="brand">Solera sweep</p><h1>{title}</h1></div></div></header>
<main class="wide">
{body}
</main>
<footer class="wide"></footer>
</body>
</html>
"""


def page(title: str, blocks: list[Block]) -> str:
    body = "\n".join(map(_html, blocks))
    return PAGE.format(title=html.escape(title), style=part("style.css"), body=body)


def _html(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"<h{level}>{html.escape(text)}</h{level}>"
        case Paragraph(text):
            return f"<p>{html.escape(text)}</p>"
        case Picture(_, inline, says):
            return f'<div class="card panel"><img src="{inline}" alt="{html.escape(says)}"></div>'
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
