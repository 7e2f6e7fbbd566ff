"""The repository's Markdown as its tests read it: links, headings, tables and code, by the parser that renders it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, DocTest, DocTestRunner
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("cluster/*.md"), *ROOT.glob("tests/golden/*.md")]
)
SOURCE = re.compile(r'\b(?:src|href)="([^"]+)"')


@dataclass(frozen=True)
class Table:
    """One table: its head, and the text of its cells."""

    head: list[str]
    rows: list[list[str]]


def tokens(page: Path) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))


def links(page: Path) -> list[str]:
    """Where links and pictures of a page lead."""
    urls = []
    for block in tokens(page):
        for token in [block, *(block.children or [])]:
            if token.type == "link_open":
                urls.append(str(token.attrs["href"]))
            elif token.type == "image":
                urls.append(str(token.attrs["src"]))
            elif token.type in ("html_inline", "html_block"):
                urls += SOURCE.findall(token.content)
    return urls


def anchors(page: Path) -> set[str]:
    """The names under which a page's headings are reached, as GitHub and MyST make them."""
    anchors_of_page: set[str] = set()
    for name in (slug(heading) for heading in headings(page)):
        number, anchor = 0, name
        while anchor in anchors_of_page:
            number += 1
            anchor = f"{name}-{number}"
        anchors_of_page.add(anchor)
    return anchors_of_page


def headings(page: Path) -> list[str]:
    parsed = tokens(page)
    return [_text(parsed[n + 1]) for n, token in enumerate(parsed) if token.type == "heading_open"]


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def tables(page: Path) -> list[Table]:
    """Every table of a page; of code and links only the text."""
    tables_of_page: list[Table] = []
    parsed = tokens(page)
    for number, token in enumerate(parsed):
        if token.type == "table_open":
            tables_of_page.append(Table([], []))
        elif token.type == "tr_open" and tables_of_page[-1].head:
            tables_of_page[-1].rows.append([])
        elif token.type == "inline" and parsed[number - 1].type == "th_open":
            tables_of_page[-1].head.append(_text(token))
        elif token.type == "inline" and parsed[number - 1].type == "td_open":
            tables_of_page[-1].rows[-1].append(_text(token))
    return tables_of_page


def code(page: Path, language: str) -> str:
    """All code of a language on a page, as one text."""
    return "\n".join(
        token.content for token in tokens(page) if token.type == "fence" and token.info.strip() == language
    )


def excerpts(page: Path) -> list[tuple[Path, str]]:
    """Python code of a page, each with the file that the last link before it leads to."""
    shown, source = [], page
    for token in tokens(page):
        for part in token.children or []:
            if part.type == "link_open":
                source = (page.parent / str(part.attrs["href"])).resolve()
        if token.type == "fence" and token.info.strip() == "python":
            shown.append((source, token.content))
    return shown


def failures(examples: DocTest) -> str:
    """What is said of the examples that fail."""
    said: list[str] = []
    DocTestRunner(verbose=False, optionflags=ELLIPSIS | NORMALIZE_WHITESPACE).run(examples, out=said.append)
    return "".join(said)


def _text(inline: Token) -> str:
    children = inline.children or []
    return "".join(token.content for token in children if token.type in ("text", "code_inline", "softbreak"))
