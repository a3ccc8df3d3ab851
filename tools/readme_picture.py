"""Run ``fedvl run`` and take docs/images/first-run.png, the README's picture, from its report.

python tools/readme_picture.py
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "first-run.png"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SIZE = "700,322"
# The accuracy chart alone, under the page's own heading.
STYLE = """
main { padding: 16px 40px 16px 16px; }
svg { overflow: visible; }
figure { overflow: visible !important; }
h1 { font-size: 1.15rem; }
.chart { font-size: 13px; }
header > :not(h1), main > section:not(#rounds), #rounds > :not(figure:first-of-type) { display: none !important; }
"""


def screenshot(page: Path, picture: Path) -> None:
    """Save a screenshot of the page as headless Chromium renders it."""
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        sys.exit("There is no Chromium here; install it, for example with apt-get install chromium.")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=2"]
    with tempfile.TemporaryDirectory() as profile:
        place = [f"--user-data-dir={profile}", f"--window-size={SIZE}", f"--screenshot={picture}"]
        subprocess.run([browser, *flags, *place, page.as_uri()], check=True, capture_output=True, timeout=60)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run, page = Path(folder) / "run", Path(folder) / "page.html"
        subprocess.run([sys.executable, "-m", "fedvl", "run", "--out", run, "--quiet"], check=True, capture_output=True)
        report = (run / "report.html").read_text(encoding="utf-8")
        page.write_text(report.replace("</style>", f"{STYLE}</style>", 1), encoding="utf-8")
        screenshot(page, PICTURE)
    with Image.open(PICTURE) as picture:  # a chart has few colours: a quarter of the bytes
        picture.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(PICTURE, optimize=True)
    print(PICTURE)


if __name__ == "__main__":
    main()
