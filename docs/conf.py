"""Sphinx settings. The source folder is the repository,
so that links are written as they lie there (`make docs`).
"""

from pyengine import __version__

project = "pyengine"
release = __version__
root_doc = "docs/index"
include_patterns = ["docs/*.md", "benchmarks/README.md", "examples/README.md"]
include_patterns += ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]

# Link targets of headings, spelled as repository hosts do.
myst_heading_anchors = 3

default_role = "code"  # docstrings say `name` where this markup wants two backticks
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Cost"]

html_theme = "furo"
html_show_copyright = False
html_title = f"pyengine {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_extra_path = ["_site"]  # the site's first page lies in a folder, as in the repository
