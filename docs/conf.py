"""The site: `sphinx-build -W docs build/site`. Pages are Markdown; the reference comes from docstrings.

Pages are written so that they also read well where they are stored: links go to files, and this configuration copies
what lies outside of this folder (notebooks, README's files) or points to it.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path.insert(0, str(DOCS))

import site_pages  # noqa: E402
from sphinx.ext import autosummary  # noqa: E402

autosummary.WELL_KNOWN_ABBREVIATIONS += ("eq.",)  # which end no sentence

project = "mpnn"
author = "mpnn developers"
version = release = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]  # type: ignore[index]
copyright = "mpnn developers, MIT license"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["img/**", "notebooks/**", "_generated/.*"]  # notebooks are written into _generated
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
# Executes the notebooks; MPNN_SITE_NOTEBOOKS=off leaves them without results, for a quick build.
nb_execution_mode = os.environ.get("MPNN_SITE_NOTEBOOKS", "force")
os.environ.setdefault("PYTHONWARNINGS", "ignore:IProgress not found")  # tqdm's, with a path of this machine
nb_execution_timeout = 600
nb_execution_raise_on_error = True
suppress_warnings = ["misc.highlighting_failure", "myst.header"]

default_role = "code"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
templates_path = ["_templates"]
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": False, "show-inheritance": False}
add_module_names = False
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True

html_theme = "pydata_sphinx_theme"
html_title = "mpnn"
html_logo = html_favicon = "_static/logo.svg"
html_static_path = ["_static"]
html_extra_path = ["_generated/.viewers"]
html_css_files = ["site.css"]
html_theme_options: dict[str, Any] = {
    "logo": {"text": "mpnn", "alt_text": "mpnn"},
    "navigation_with_keys": True,
    "show_prev_next": True,
    "header_links_before_dropdown": 8,
    "secondary_sidebar_items": {
        "[!_]**": ["page-toc"],
        "_generated/[!a]*": ["page-toc"],
        "_generated/api/*": [],
    },
    "footer_start": ["copyright"],
    "footer_end": [],
    "show_toc_level": 2,
    "pygments_light_style": "tango",
    "pygments_dark_style": "github-dark",
}
html_show_sourcelink = False
html_sidebars = {"try": [], "index": []}


def link_back(app: Any, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Pages of sources link to the names under which their objects are documented. viewcode takes the module of the
    first such name for all objects of a source."""

    def named(link: re.Match[str]) -> str:
        page, anchor = link[1], link[2]
        _, kind, member = anchor.partition("." + page.rpartition(".")[2])
        return f"api/{page}.html#{page}{member}" if kind else link[0]

    if pagename.startswith("_modules/"):
        context["body"] = re.sub(r"api/([\w.]+)\.html#([\w.]+)", named, context["body"])


def setup(app: Any) -> None:
    app.connect("html-page-context", link_back)
    site_pages.write(DOCS / "_generated")
    site_pages.viewers(DOCS / "_generated" / ".viewers")
    app.connect("source-read", site_pages.links_that_work_here)
    app.connect("autodoc-process-docstring", site_pages.as_restructured_text, priority=400)  # before napoleon
