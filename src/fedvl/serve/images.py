"""The example image of the page, and small copies of images that are sent to it."""

import base64
import io
from pathlib import Path

from fedvl.data.catalogue import is_own
from fedvl.data.images import MAX_IMAGE_BYTES, BadImage, decode
from fedvl.errors import FedVLError
from fedvl.files import read_file
from fedvl.runs.folder import RunFolder

PREVIEW_SIDE = 480  # pixels of the longer side


def example_file(folder: RunFolder, chosen: Path | None) -> tuple[str, bytes] | None:
    """Return the name and content of the image that the page offers as an example.

    Of a public dataset it is a test image of the run's report; images of one's own are not offered.
    """
    if chosen is not None:
        try:
            content = read_file(chosen, MAX_IMAGE_BYTES)
            decode(content)
        except (OSError, BadImage) as error:
            raise FedVLError(
                f"{chosen} cannot be the example image ({str(error).rstrip('.')}); give another as --example."
            ) from error
        return chosen.name, content
    shown = [*folder.examples.gained, *folder.examples.lost]
    if not shown or is_own(folder.experiment.data.dataset):
        return None
    kind, _, data = shown[0].image.partition(";base64,")
    return f"example.{kind.rpartition('/')[2]}", base64.b64decode(data)


def preview_of(content: bytes) -> bytes:
    """Return a small copy of an image that browsers show, without the headers of its file."""
    small = decode(content)
    small.thumbnail((PREVIEW_SIDE, PREVIEW_SIDE))
    shown = io.BytesIO()
    small.save(shown, "PNG")
    return shown.getvalue()
