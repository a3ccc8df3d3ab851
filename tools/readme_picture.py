"""Draw the README's picture from the run folder of a bare ``fedvl run``.

python tools/readme_picture.py runs/linear-cifar10-mini
"""

import json
import sys
from pathlib import Path

from fedvl.report.figures import accuracy_figure

result = json.loads((Path(sys.argv[1]) / "result.json").read_text(encoding="utf-8"))
print(accuracy_figure(result, Path(__file__).parents[1] / "docs" / "images" / "first-run.png"))
