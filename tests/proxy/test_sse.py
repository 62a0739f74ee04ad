import json

from areal.proxy.dialects.base import sse_data


def test_an_event_is_one_line_however_lines_are_split():
    said = {"content": "a\nb\r\x0b\x0c\x1c\x85\u2028\u2029z é"}
    lines = sse_data(said).decode().splitlines()
    assert len([line for line in lines if line]) == 1
    assert json.loads(lines[0].removeprefix("data: ")) == said
