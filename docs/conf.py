"""How the documentation is built: ``sphinx-build -W -b html docs docs/_build``. Nothing is fetched, now or by the reader."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
# autodoc would import it with TYPE_CHECKING set, under which pydantic refuses models that allow extra fields
import fedvl.compare.grid  # noqa: F401
from fedvl import __version__

project = "FedVL"
author = "the FedVL authors"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "extension"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"FedVL {__version__}"
html_math_renderer = "mathml"
html_show_sourcelink = False
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["fedvl.css"]
html_copy_source = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
