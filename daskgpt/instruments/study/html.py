"""report.html: a report as one page that needs no other file and no network."""

from __future__ import annotations

from base64 import b64encode
from html import escape
from pathlib import Path

PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 1040px; margin: 0 auto; padding: 8px 20px 60px; }}
h1 {{ font-size: 1.6em; line-height: 1.25; }}
h2 {{ margin-top: 2em; border-bottom: 1px solid #ddd; }}
img {{ display: block; max-width: 100%; height: auto; margin: 12px auto; }}
table {{ display: block; overflow-x: auto; border-collapse: collapse; font-size: 14px; margin: 12px 0; }}
th, td {{ border: 1px solid #ddd; padding: 4px 10px; text-align: left; white-space: nowrap; }}
th {{ background: #f4f4f4; }}
td + td {{ font-variant-numeric: tabular-nums; }}
blockquote {{ margin: 16px 0; padding: 4px 18px; background: #fff3cd; border-left: 6px solid #e0a800; }}
</style>
</head>
<body>
{body}
</body>
</html>
"""


def html_of(text: str, title: str, folder: Path) -> str:
    """The page of a report in Markdown; the figures that it names are read from the folder, as SVG, into it."""
    from markdown_it import MarkdownIt  # an extra brings it, as it brings matplotlib

    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse(text)
    for image in [child for token in tokens for child in token.children or () if child.type == "image"]:
        image.attrSet("src", data_uri(folder / str(image.attrGet("src"))))
    return PAGE.format(title=escape(title), body=markdown.renderer.render(tokens, markdown.options, {}))


def data_uri(png: Path) -> str:
    """The SVG beside a PNG, as a link that holds it."""
    return "data:image/svg+xml;base64," + b64encode(png.with_suffix(".svg").read_bytes()).decode()
