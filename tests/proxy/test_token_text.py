"""Pieces of a growing answer join to the whole, whatever the tokens are and however they arrive."""

from functools import cache

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from areal.engine.builtin.tokenizer import make_tokenizer
from areal.proxy.streaming import AnswerStream, StopFilter, TokenText, byte_token_ids
from areal.trajectory.answer import before_stop
from areal.trajectory.rendering import Renderer


@cache
def byte_level():
    return Renderer(make_tokenizer(["Sort 5291 into 1259, hello there, äöü 你好"] * 4, 300, 512))


class ByteFallback:
    """As Llama-2 and Mistral spell what they have no token for, in the renderer's interface."""

    def __init__(self):
        words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁hello", "▁", "lo", "你"]
        core = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, [], unk_token="<unk>"))
        core.pre_tokenizer = pre_tokenizers.Metaspace()
        core.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        self.core, self.size = core, len(words)

    def decode(self, ids):
        return self.core.decode(list(ids), skip_special_tokens=False)

    def convert_tokens_to_ids(self, names):
        return [self.core.token_to_id(name) for name in names]

    def convert_ids_to_tokens(self, token):
        return self.core.id_to_token(token)


@cache
def byte_fallback():
    return ByteFallback()


def cut(items, places):
    ends = sorted({min(place, len(items)) for place in places} | {len(items)})
    return [items[start:end] for start, end in zip([0, *ends], ends, strict=False) if start < end]


PLACES = st.lists(st.integers(0, 40), max_size=40)


@given(st.lists(st.integers(0, 299), max_size=40), PLACES)
def test_any_byte_level_tokens_join_to_their_text(ids, places):
    renderer = byte_level()
    text = TokenText(renderer, byte_token_ids(renderer.tokenizer), ())
    pieces = [text.feed(part) for part in cut(ids, places)]
    whole = renderer.decode(ids)
    assert "".join(pieces) + text.rest(whole) == whole


@given(st.lists(st.integers(0, 260), max_size=30), PLACES)
def test_any_byte_fallback_tokens_join_to_their_text(ids, places):
    tokens = byte_fallback()
    text = TokenText(tokens, byte_token_ids(tokens), ())
    pieces = [text.feed(part) for part in cut(ids, places)]
    whole = tokens.decode(ids)
    assert "".join(pieces) + text.rest(whole) == whole


def test_a_character_of_several_tokens_leaves_whole():
    renderer = byte_level()
    ids = renderer.encode("a🙂b")
    text = TokenText(renderer, (), ())
    pieces = [text.feed([token]) for token in ids]
    assert "".join(pieces) == "a🙂b"
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert "🙂" in pieces


def test_vocabularies_without_byte_tokens_have_none():
    assert byte_token_ids(byte_level().tokenizer) == frozenset()
    assert len(byte_token_ids(byte_fallback())) == 256


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    PLACES,
)
def test_stop_texts_cut_a_stream_where_they_cut_the_whole(text, stops, places):
    filtered = StopFilter(stops)
    pieces = [filtered.feed(part) for part in cut(text, places)]
    assert "".join(pieces) + filtered.finish() == before_stop(text, stops)


MARKED = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", '{"name": "add", "arguments": {}}', "\n", " ", "hi", "<", "ö", "</tool", "stop"]
    ),
    max_size=12,
).map("".join)


@given(MARKED, PLACES)
def test_a_stream_says_what_the_finished_answer_says(text, places):
    renderer = byte_level()
    ids = renderer.encode(text)
    tools = [{"type": "function", "function": {"name": "add"}}]
    stream = AnswerStream(
        renderer, name="x", tools=tools, thinking=False, stop_ids=(), stop_texts=["stop"], byte_ids=()
    )
    events = [event for part in cut(ids, places) for event in stream.feed(part)]
    events += stream.finish(renderer.decode(ids))
    said = renderer.format.read(before_stop(renderer.decode(ids), ["stop"]), tools)
    assert "".join(event.text for event in events if hasattr(event, "text")) == said.content
    assert [event.name for event in events if hasattr(event, "name")] == [call.name for call in said.calls]
