"""Images as encoded bytes (PNG, JPEG, …): read from whatever holds one, checked, decoded.

Does not download anything, and refuses to decode what is too big: a small file may unpack to gigabytes. Needs Pillow on
first use.
"""

import base64
import binascii
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from areal.utils.installing import missing

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Pillow knows more formats, some of which run other programs."""
MAX_BYTES = 16 * 2**20
MAX_PIXELS = 2**25


class ImageError(ValueError):
    """Something is not an image, or is too big."""


@dataclass(frozen=True)
class ImageFacts:
    """What the head of an image says."""

    format: str
    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height} {self.format.lower()}"


def encode_image(source: Any) -> bytes:
    """The encoded bytes of a data URL, a path or `file:` URL, encoded bytes, or a PIL image (as PNG). Reads files."""
    if isinstance(source, str):
        data = _read_text(source)
    elif isinstance(source, Path):
        data = _read_file(source)
    elif isinstance(source, bytes | bytearray | memoryview):
        data = bytes(source)
    elif hasattr(source, "save") and hasattr(source, "mode"):  # without importing Pillow to ask
        data = _as_png(source)
    else:
        raise ImageError(
            f"an image must be a data URL, a path, encoded bytes or a PIL image, got {type(source).__name__}"
        )
    inspect_image(data)
    return data


def read_data_url(url: str) -> bytes:
    """The bytes of a `data:` URL, and of no other: no file is read, nothing is downloaded."""
    if not url[:5].lower() == "data:":
        raise ImageError(f"an image must be a data URL (data:image/png;base64,…), got {url!r:.100}; {_remedy(url)}")
    head, comma, body = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise ImageError(f"a data URL must look like data:image/png;base64,…, got {url!r:.100}")
    return read_base64(unquote(body) if "%" in body else body)


def read_base64(text: str) -> bytes:
    if len(text) > MAX_BYTES * 4 // 3 + 4:
        raise _too_many_bytes(len(text) * 3 // 4)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"an image's data must be base64 without line breaks, got {text!r:.60} ({error})") from None


def inspect_image(data: bytes) -> ImageFacts:
    """Format and size, by the head alone: the rest may still turn out to be broken."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise ImageError(missing("images need Pillow", error, "vision")) from error
    if len(data) > MAX_BYTES:
        raise _too_many_bytes(len(data))
    try:
        image = Image.open(BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise ImageError(f"an image must be {', '.join(FORMATS)}, got {len(data)} bytes of none of these") from None
    except Image.DecompressionBombError as error:
        raise ImageError(f"an image may have {MAX_PIXELS} pixels: {error}; shrink it") from None
    except Exception as error:  # the bytes come from outside: a decoder may raise anything on them
        raise _broken(error) from error
    if image.width * image.height > MAX_PIXELS:
        raise ImageError(f"an image may have {MAX_PIXELS} pixels, got {image.width}x{image.height}; shrink it")
    return ImageFacts(image.format or "image", image.width, image.height)


def decode_image(data: bytes) -> Any:
    """A PIL image in RGB, rotated as its EXIF data says; of an animation, the first frame."""
    from PIL import Image, ImageOps

    inspect_image(data)
    try:
        return ImageOps.exif_transpose(Image.open(BytesIO(data), formats=FORMATS)).convert("RGB")
    except Exception as error:  # as above
        raise _broken(error) from error


def _read_text(source: str) -> bytes:
    if source[:5].lower() == "data:":
        return read_data_url(source)
    scheme = urlsplit(source).scheme.lower() if "://" in source else ""
    if source[:5].lower() == "file:":
        return _read_file(Path(url2pathname(urlsplit(source).path)))
    if scheme:
        raise ImageError(f"an image must be a data URL or a path, got {source!r:.100}; {_remedy(source)}")
    return _read_file(Path(source))


def _remedy(url: str) -> str:
    if url[:4].lower() == "http":
        return "nothing is downloaded here: fetch it yourself and send it as a data URL"
    return "read it yourself and send it as a data URL"


def _read_file(path: Path) -> bytes:
    path = path.expanduser()
    if not path.is_file():
        raise ImageError(f"an image's path must name a file, got {str(path)!r:.200}")
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ImageError(f"an image must be readable: {error}") from error


def _as_png(image: Any) -> bytes:
    buffer = BytesIO()
    writable = image if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16") else image.convert("RGB")
    writable.save(buffer, format="PNG")
    return buffer.getvalue()


def _too_many_bytes(size: int) -> ImageError:
    return ImageError(f"an image may have {MAX_BYTES} bytes, got {size}; shrink it or encode it as JPEG")


def _broken(error: Exception) -> ImageError:
    return ImageError(f"an image must be whole, this one cannot be decoded ({type(error).__name__}: {error})")
