"""How the Markdown of this repository becomes a site that needs no network: `sphinx-build -W -c docs . site`.

The repository's root is the source, so that a link between any two of its files is a link of the site as well.
"""

from __future__ import annotations

import sys
from pathlib import Path

from docutils.nodes import Element
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from docstrings import structured  # noqa: E402

project, author, copyright = "daskgpt", "the authors of daskgpt", "the authors of daskgpt, MIT licence"
root_doc = "docs/index"
include_patterns = ["docs/*.md", "docs/measurements/*.md", "*.md", "cluster/*.md"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]

myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["math"]
myst_heading_anchors = 4
suppress_warnings = ["toc.not_included"]  # README and the like are reached by links

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 80

html_theme = "furo"
html_title = "daskgpt"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sphinx = False
pygments_style, pygments_dark_style = "friendly", "native"


def _visit(translator: object, node: Element, *, block: bool) -> None:
    """A formula as MathML, which browsers draw themselves: docutils' converter, for which Sphinx has no name yet."""
    from docutils.nodes import SkipNode

    try:
        html = tex2mathml(node.astext(), as_block=block)
    except MathError as error:
        logging.getLogger(__name__).warning("formula: %s: %s", error, node.astext(), location=node)
        raise SkipNode from error
    translator.body.append(f'<div class="math">{html}</div>' if block else html)
    raise SkipNode


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer(
        "mathml",
        inline_renderers=(lambda translator, node: _visit(translator, node, block=False), None),
        block_renderers=(lambda translator, node: _visit(translator, node, block=True), None),
    )
    app.connect("autodoc-process-docstring", lambda app, what, name, obj, options, lines: structured(lines))
