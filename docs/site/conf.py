"""Settings of the documentation site; `make docs` builds it, and warnings are errors."""

import importlib.metadata

project = "bert_jax"
copyright = "the authors of bert_jax"
release = importlib.metadata.version("bert_jax")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme = "furo"
html_title = f"bert_jax {release}"

# Pages are read on GitHub too: headings have the anchors that they have there.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

# Docstrings are written in Markdown's `code`, not in reStructuredText's ``code``.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_numpy_docstring = False
napoleon_use_rtype = False  # the texts of "Returns:" name no types
smartquotes = False


def _link_inside(app, name, source):
    """Lead links to the README, which is no page here, to the page that holds its tree."""
    source[0] = source[0].replace("../README.md#", "/site/tree.md#")


def setup(app):
    """Connect what is above."""
    app.connect("source-read", _link_inside)
