"""How the documentation is built: ``sphinx-build -W -b html docs docs/_build``. Nothing is fetched, now or by the reader.

Notebooks are shown without results. With ``FEDVL_EXECUTE=1`` they are run first, half a minute more, and shown with them.
"""

import os
import re
import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from fedvl import __version__

# autodoc would import them with TYPE_CHECKING set, under which pydantic refuses models that allow extra fields
for module in re.findall(r"automodule:: (\S+)", (Path(__file__).parent / "api.md").read_text(encoding="utf-8")):
    import_module(module)

project = "FedVL"
author = "the FedVL authors"
version = release = __version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "extension"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "jupyter_execute"]
nb_execution_mode = "force" if os.environ.get("FEDVL_EXECUTE") else "off"
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_ipywidgets_js = {}  # which would be fetched from elsewhere
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
autodoc_preserve_defaults = False  # the signature of fedvl.run is generated, so it has no defaults in the source
