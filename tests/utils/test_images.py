"""Images from whatever holds one, and what is refused before it can do harm."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tiny_processor import data_url, png

from areal.utils.images import MAX_BYTES, ImageError, decode_image, encode_image, inspect_image, read_data_url

RED = png("red")


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is this big."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in ((b"IHDR", head), (b"IDAT", zlib.compress(b"")), (b"IEND", b""))
    )
    return b"\x89PNG\r\n\x1a\n" + chunks


def test_whatever_holds_an_image_gives_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a red one.png"
    path.write_bytes(RED)
    for source in (data_url(RED), RED, bytearray(RED), path, str(path), path.as_uri()):
        assert encode_image(source) == RED


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "CMYK", "F"])
def test_pil_image_loses_nothing_that_the_model_sees(mode: str) -> None:
    image = Image.linear_gradient("L").resize((8, 8)).convert(mode)
    assert decode_image(encode_image(image)).tobytes() == image.convert("RGB").tobytes()


def test_facts_are_read_from_the_head() -> None:
    assert str(inspect_image(RED)) == "40x32 png"


def test_photograph_is_turned_as_its_camera_says() -> None:
    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright
    Image.new("RGB", (40, 32)).save(buffer, format="JPEG", exif=exif)
    assert decode_image(buffer.getvalue()).size == (32, 40)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("https://example.org/cat.png", "nothing is downloaded here: fetch it yourself and send it as a data URL"),
        ("ftp://example.org/cat.png", "must be a data URL or a path"),
        ("no such file.png", "must name a file"),
        (Path("/dev/zero"), "must name a file"),
        ("data:image/png,abc", "must look like data:image/png;base64,…"),
        ("data:image/png;base64,a!b", "must be base64"),
        (data_url(b"hello"), "must be PNG, JPEG, WEBP, GIF, BMP, got 5 bytes"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "must be PNG"),
        (b"", "got 0 bytes"),
        (bytes(MAX_BYTES + 1), f"may have {MAX_BYTES} bytes"),
        (data_url(b"") + "A" * (MAX_BYTES * 4 // 3 + 5), f"may have {MAX_BYTES} bytes"),
        (bomb(20_000, 20_000), "shrink it"),
        (bomb(6000, 6000), "may have 33554432 pixels, got 6000x6000"),
        (7, "got int"),
    ],
)
def test_what_is_not_an_image_or_too_big_is_refused(source: Any, says: str) -> None:
    with pytest.raises(ImageError, match=says.replace("(", r"\(")):
        encode_image(source)


@pytest.mark.parametrize("url", ["/etc/passwd", "file:///etc/passwd", "http://localhost/cat.png"])
def test_data_url_reader_reads_nothing_else(url: str) -> None:
    with pytest.raises(ImageError, match="must be a data URL"):
        read_data_url(url)


@pytest.mark.parametrize("data", [RED[:-40], bomb(40, 32)], ids=["cut off", "nothing in it"])
def test_broken_image_is_refused_when_it_is_decoded(data: bytes) -> None:
    encode_image(data)
    with pytest.raises(ImageError, match="must be whole"):
        decode_image(data)
