"""Incremental text: equal to decoding at once, never torn; stop strings are found across every boundary."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from gateway.tokens import Codec
from gateway.tokens.stream import WINDOW_MAX, ByteLevelDetokenizer, StopStrings, WindowDetokenizer
from tests.support import codecs
from tests.support.quick import examples

TEXTS = st.text(alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from("aé€😀 \n中")), max_size=40)


def pieces(codec: Codec, token_ids: list[int], cuts: list[int], **kwargs: object) -> list[str]:
    """Feeds the ids in chunks of the given sizes (the last size repeats)."""
    decoder = codec.stream_decoder(**kwargs)  # type: ignore[arg-type]
    out, sizes = [], iter(cuts)
    while token_ids:
        size = next(sizes, 1)
        out.append(decoder.feed(token_ids[:size]))
        token_ids = token_ids[size:]
    return [*out, decoder.flush()]


def up_to_stop_string(codec: Codec, token_ids: list[int], stops: list[str]) -> tuple[str, int]:
    """The text that is shown, and how many tokens were read."""
    decoder, strings, shown = codec.stream_decoder(), StopStrings(stops), ""
    for number, token_id in enumerate(token_ids, 1):
        text, stopped_by = strings.feed(decoder.feed([token_id]))
        shown += text
        if stopped_by is not None:
            return shown, number
    text, stopped_by = strings.feed(decoder.flush())
    return shown + text + strings.finish(), len(token_ids)


@examples(50)
@given(text=TEXTS, cuts=st.lists(st.integers(1, 5), max_size=10))
@pytest.mark.parametrize("make", [codecs.tiny, codecs.llama3, codecs.sentencepiece])
def test_deltas_join_to_the_whole_and_none_is_torn(make: object, text: str, cuts: list[int]) -> None:
    codec: Codec = make()  # type: ignore[operator]
    text = text.replace("\ufffd", "").replace("▁", "")
    ids = codec.encode(text)
    deltas = pieces(codec, ids, cuts, show_special=True)
    assert "".join(deltas) == codec.decode(ids)
    assert not any("\ufffd" in delta for delta in deltas)


@examples(50)
@given(ids=st.lists(st.integers(3, 511), max_size=30), cuts=st.lists(st.integers(1, 5), max_size=10))
def test_any_ids_read_as_tokenizers_reads_them(ids: list[int], cuts: list[int]) -> None:
    codec = codecs.tiny()
    assert "".join(pieces(codec, ids, cuts, show_special=True)) == codec.decode(ids)


@settings(max_examples=50, suppress_health_check=[HealthCheck.filter_too_much])
@given(ids=st.lists(st.integers(3, 280), max_size=40))
def test_a_sentencepiece_vocabulary_reads_alike_token_by_token(ids: list[int]) -> None:
    codec = codecs.sentencepiece()
    assume("\ufffd" not in codec.decode(ids))  # broken bytes have no one right reading
    assert "".join(pieces(codec, ids, [], show_special=True)) == codec.decode(ids)


@examples(50)
@given(
    text=st.text(alphabet="abé.", max_size=30),
    stops=st.lists(st.text(alphabet="abé.", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_end_the_text_wherever_the_tokens_end(text: str, stops: list[str]) -> None:
    codec = codecs.tiny()
    ids = codec.encode(text)
    assert up_to_stop_string(codec, ids, stops)[0] == up_to_stop(codec, ids, stops)


def up_to_stop(codec: Codec, ids: list[int], stops: list[str]) -> str:
    """What is to be shown: after the first token with which a stop string is there, the text before it."""
    for end in range(len(ids) + 1):
        text = codec.decode(ids[:end]).rstrip("\ufffd")
        if found := [text.index(stop) for stop in stops if stop in text]:
            return text[: min(found)]
    return codec.decode(ids)


def test_a_stop_string_ends_with_its_last_token() -> None:
    codec = codecs.tiny()
    ids = codec.encode("one END two")
    text, used = up_to_stop_string(codec, ids, ["END"])
    assert text == "one "
    assert codec.decode(ids[:used]).startswith("one END")
    assert "END" not in codec.decode(ids[: used - 1])


def test_what_could_begin_a_stop_string_is_held_and_given_back() -> None:
    strings = StopStrings(["###"])
    assert [strings.feed(text) for text in ("a#", "#b", "##")] == [("a", None), ("##b", None), ("", None)]
    assert strings.finish() == "##"


def test_a_stop_string_that_begins_where_none_counts_is_none() -> None:
    strings = StopStrings(["bb"])
    assert strings.feed("abb", checked=False) == ("abb", None)
    assert strings.feed("b") == ("", None)
    assert strings.feed("b") == ("", "bb")


def test_special_tokens_are_hidden_unless_asked_for() -> None:
    codec = codecs.llama3()
    ids = [
        *codec.encode("hi"),
        codec.tokenizer.token_to_id("<|python_tag|>"),
        codec.tokenizer.token_to_id("<|eot_id|>"),
    ]
    assert "".join(pieces(codec, ids, [])) == "hi"
    assert "".join(pieces(codec, ids, [], markers=True)) == "hi<|python_tag|>"
    assert "".join(pieces(codec, ids, [], show_special=True)) == "hi<|python_tag|><|eot_id|>"


@pytest.mark.parametrize(
    ("make", "special", "end"), [(codecs.qwen3, "<|im_start|>", "<|im_end|>"), (codecs.sentencepiece, "<s>", "</s>")]
)
def test_special_tokens_are_shown_within_a_call_but_those_that_end_the_turn(
    make: Callable[[], Codec], special: str, end: str
) -> None:
    codec, within = make(), False
    decoder = codec.stream_decoder(codec.encode("x"), markers=True, in_call=lambda: within)
    a, (b, e) = codec.encode("a"), map(codec.tokenizer.token_to_id, (special, end))
    assert decoder.special >= {b}
    assert special not in decoder.feed([*a, b, *a, e])
    within = True
    assert decoder.feed([b]).strip() == special
    assert decoder.feed([e]) == ""


def test_a_torn_end_is_shown_as_a_replacement_character() -> None:
    codec = codecs.tiny()
    ids = codec.encode("😀")
    assert len(ids) > 1
    assert "".join(pieces(codec, ids[:-1], [])) == "\ufffd"


def test_the_generic_window_stays_bounded() -> None:
    codec = codecs.sentencepiece()
    broken = codec.tokenizer.token_to_id("<0xE2>")
    decoder = codec.stream_decoder()
    longest_wait, waited = 0, 0
    for _ in range(4 * WINDOW_MAX):
        waited = 0 if decoder.feed([broken]) else waited + 1
        longest_wait = max(longest_wait, waited)
    assert longest_wait < WINDOW_MAX


def test_ids_without_text_take_the_same_work_each() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "x": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.Replace("x", "")

    class Counting:
        decoded = 0

        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            self.decoded += len(ids)
            return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    for silent in (1, 500):  # a token without text, and an id without a token: the padding of an embedding
        counting = Counting()
        decoder = WindowDetokenizer(counting, frozenset())  # type: ignore[arg-type]
        assert decoder.feed([0] + [silent] * 2_000) == "a"
        assert counting.decoded < 2_000 * 3 * WINDOW_MAX
        assert decoder.feed([0]).strip() == "a"


def test_smollm2_reads_text_back() -> None:
    codec = codecs.smollm2()
    text = "Café — 東京 😀\n  def f(x):\n\treturn x**2  # ok"
    assert "".join(pieces(codec, codec.encode(text), [])) == text
    assert isinstance(codec.stream_decoder(), ByteLevelDetokenizer)
