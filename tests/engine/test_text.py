"""Streaming text: what is shown in pieces is the whole, nothing shown is taken back, stop strings cut where they should."""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from longspool.engine.text import Detokenizer, StopStrings

TEXT = (
    "The quick brown fox jumps over the lazy dog. It's 3.14 o'clock; isn't it?\n\n    def f(x):\n\treturn x ** 2\n"
    "Ein süßer Straßenmusikant, 日本語のテキスト, Ελληνικά, العربية, हिन्दी, 👩‍👩‍👧‍👦 🇺🇳 🏳️‍🌈 e\u0301 \u00a0 naïve — “quoted”…\n"
    " 한국어 \U0010ffff ₀€\n"
)
BROKEN = "\ufffd"


class Peer:
    """A tokenizer in the shape that the detokenizer asks for, with a count of what it decoded."""

    def __init__(self, vocab_size: int, decode: Callable[[list[int]], str], encode: Callable[[str], list[int]]) -> None:
        self.vocab_size, self._decode, self.encode, self.longest = vocab_size, decode, encode, 0

    def decode(self, ids: Sequence[int]) -> str:
        self.longest = max(self.longest, len(ids))
        return self._decode(list(ids))


def _fast(core: tokenizers.Tokenizer) -> Peer:
    return Peer(core.get_vocab_size(), core.decode, lambda text: core.encode(text, add_special_tokens=False).ids)


def _byte_level() -> Peer:
    """As GPT-2, Llama 3, Qwen and SmolLM: tokens are byte strings and may end inside a character."""
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator([TEXT] * 3, trainer)
    return _fast(core)


def _byte_fallback() -> Peer:
    """As Llama 2 and Mistral: words with a mark for the space, unknown characters as runs of byte tokens, one space dropped in front."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", "▁the", "▁fox", "é", "日", "."]
    letters = sorted({c for c in TEXT if c.isascii() and c.isalnum()})
    vocab = {piece: token for token, piece in enumerate([*pieces, *letters])}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "▁")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    core.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    strip = decoders.Strip(" ", 1, 0)
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return _fast(core)


def _metaspace() -> Peer:
    """As T5: a unigram model without bytes."""
    pieces = ["<unk>", "▁", "▁the", "▁fox", "s", "日本", "é", *"abcdefghijklmnopqrt.,"]
    core = tokenizers.Tokenizer(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], 0, False))
    core.add_special_tokens(["<unk>"])
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return _fast(core)


def _sentencepiece() -> Peer:
    """The sentencepiece library itself, whose decoder mends each broken byte alone."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([TEXT.encode("ascii", "ignore").decode(), "the fox é"] * 4),
        model_writer=model,
        vocab_size=340,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    core = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return Peer(core.vocab_size(), core.decode, core.encode)


KINDS = {"byte level": _byte_level, "byte fallback": _byte_fallback, "metaspace": _metaspace, "sentencepiece": _sentencepiece}


@functools.cache
def peer(kind: str) -> Peer:
    return KINDS[kind]()


def shown(tokenizer: Peer, ids: Sequence[int]) -> list[str]:
    """What each push shows, and the flush last."""
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


def promises(tokenizer: Peer, ids: Sequence[int]) -> None:
    """The pieces make the whole, and what is shown at any moment begins the text of every later moment."""
    pieces = shown(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    so_far = ""
    for count, piece in enumerate(pieces[:-1], 1):
        so_far += piece
        for later in range(count, len(ids) + 1):
            assert tokenizer.decode(ids[:later]).startswith(so_far)


# ------------------------------------------------------------------------------------------------- detokenizer


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_tokens_in_pieces_make_their_text(kind: str, data: st.DataObject) -> None:
    one = peer(kind)
    promises(one, data.draw(st.lists(st.integers(0, one.vocab_size - 1), max_size=24)))


@pytest.mark.parametrize("kind", ["byte level", "byte fallback", "sentencepiece"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_byte_tokens_in_pieces_make_their_text(kind: str, data: st.DataObject) -> None:
    """Denser trouble: bytes that begin, go on and break characters, among a few words and spaces."""
    one = peer(kind)
    single = [token for token in range(one.vocab_size) if one.decode([token]) == BROKEN]
    some = [token for token in range(one.vocab_size) if one.decode([token]) in ("", "\n", "a", "the", " ")]
    assert len(single) >= 128 and some
    promises(one, data.draw(st.lists(st.sampled_from(single) | st.sampled_from(some), max_size=16)))


def test_spaces_between_words_survive_a_decoder_that_drops_leading_ones() -> None:
    """Found by chance once: sentencepiece drops every space piece at the start of what it is given."""
    one = peer("sentencepiece")
    word = one.encode("the")
    space = next(token for token in range(one.vocab_size) if one.decode([*word, token]) == "the " and one.decode([token]) == "")
    assert one.decode([space, space, *word]) == "the" and one.decode([*word, space, *word]) == "the  the"
    promises(one, [*word, space, *word, space, space, *word])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80, deadline=None)
@given(
    text=st.text(alphabet=st.characters(codec="utf-8"), max_size=12)
    | st.sampled_from([TEXT, TEXT[60:], " a  b", "   ", "\n\n x", "\ufffd\ufffd"])
)
def test_any_text_in_pieces_comes_back(kind: str, text: str) -> None:
    one = peer(kind)
    ids = one.encode(text)
    assert "".join(shown(one, ids)) == one.decode(ids)
    if kind == "byte level":
        assert one.decode(ids) == text


def test_the_tokenizers_here_do_cut_characters_and_do_change_their_minds() -> None:
    """The tests above mean something: plain differences of decoded prefixes fail on these tokenizers."""
    for kind in ("byte level", "byte fallback", "sentencepiece"):
        one = peer(kind)
        ids = one.encode(TEXT)
        prefixes = [one.decode(ids[:count]) for count in range(len(ids) + 1)]
        assert sum(not b.startswith(a) for a, b in itertools.pairwise(prefixes)) > 20, kind
    fallback = peer("byte fallback")
    newline, euro = fallback.encode("\n"), fallback.encode("€")
    assert len(euro) == 3 and fallback.decode(newline) == "\n"
    assert fallback.decode([*newline, *euro, euro[0]]) == BROKEN * 5  # one broken byte takes whole characters with it


def test_text_is_shown_as_soon_as_it_is_certain() -> None:
    one = peer("byte level")
    ids, so_far = one.encode(TEXT), ""
    for count, piece in enumerate(shown(one, ids)[:-1], 1):
        so_far += piece
        assert so_far == one.decode(ids[:count]).rstrip(BROKEN)

    one = peer("byte fallback")
    ids, so_far = one.encode(TEXT), ""
    in_run = [3 <= token < 259 for token in ids]
    for count, piece in enumerate(shown(one, ids)[:-1], 1):
        so_far += piece
        if not in_run[count - 1]:
            assert so_far == one.decode(ids[:count])
    assert 30 < sum(in_run) < len(ids) - 30


def test_the_first_half_of_a_character_waits_and_text_before_it_does_not() -> None:
    one = peer("byte level")
    whole = one.encode("𓀀")
    parts, (a, b) = whole[:-1], one.encode("ab")
    assert len(parts) >= 2 and one.decode(parts) == BROKEN
    detokenizer = Detokenizer(one)
    assert [detokenizer.push(token) for token in [a, *whole]] == ["a", *[""] * len(parts), "𓀀"]
    assert [detokenizer.push(token) for token in [*parts, b]] == [*[""] * len(parts), f"{BROKEN}b"]
    assert [detokenizer.push(token) for token in parts] == [""] * len(parts)
    assert detokenizer.flush() == BROKEN and detokenizer.flush() == ""
    assert detokenizer.push(a) == "a"


@pytest.mark.parametrize("kind", KINDS)
def test_a_push_costs_the_same_however_long_the_answer_is(kind: str) -> None:
    one = peer(kind)
    ids = one.encode("the fox. the  fox\n" * 400)
    one.longest = 0
    detokenizer = Detokenizer(one)
    one.longest = 0
    assert "".join([*(detokenizer.push(token) for token in ids), detokenizer.flush()]) == one._decode(ids)
    assert len(ids) > 1500 and one.longest <= 16


@pytest.mark.real
def test_smollm2_streams_every_script(smollm2: Path) -> None:
    from longspool.model.gguf_file import GGUFFile
    from longspool.model.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_gguf(GGUFFile(smollm2).metadata)
    ids = [*tokenizer.encode(TEXT * 3), tokenizer.eos[0], *tokenizer.encode(TEXT)]
    detokenizer, so_far = Detokenizer(tokenizer), ""
    for count, token in enumerate(ids, 1):
        so_far += detokenizer.push(token)
        assert so_far == tokenizer.decode(ids[:count]).rstrip(BROKEN)
    assert so_far + detokenizer.flush() == TEXT * 4


# ------------------------------------------------------------------------------------------------- stop strings


def cut(text: str, stops: Sequence[str]) -> tuple[str, int | None]:
    """By definition: read character by character until some stop string is complete; (what stands before it, where it was complete)."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], end
    return text, None


def stream(stops: Sequence[str], pieces: Sequence[str]) -> tuple[str, int | None]:
    """(all that is shown, which piece stopped it)."""
    one, out, stopped_at = StopStrings(stops), "", None
    for number, piece in enumerate(pieces):
        emit, stopped = one.push(piece)
        out += emit
        if stopped and stopped_at is None:
            stopped_at = number
        assert stopped == (stopped_at is not None)
    return out + one.flush(), stopped_at


PIECES = st.lists(st.text("abc", max_size=4), max_size=10)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


@settings(max_examples=500, deadline=None)
@given(STOPS, PIECES)
def test_a_stream_is_cut_at_the_first_complete_stop_string(stops: list[str], pieces: list[str]) -> None:
    want, end = cut("".join(pieces), stops)
    out, number = stream(stops, pieces)
    assert out == want
    if end is None:
        assert number is None
    else:
        assert number is not None and len("".join(pieces[:number])) < end <= len("".join(pieces[: number + 1]))


@settings(max_examples=300, deadline=None)
@given(STOPS, PIECES)
def test_only_what_may_become_a_stop_string_is_held_back(stops: list[str], pieces: list[str]) -> None:
    one, text, out = StopStrings(stops), "", ""
    for piece in pieces:
        text += piece
        emit, stopped = one.push(piece)
        out += emit
        if stopped:
            return
        held = text[len(out) :]
        starts = [size for size in range(1, len(text) + 1) if any(stop.startswith(text[-size:]) for stop in stops)]
        assert len(held) == max(starts, default=0)


@pytest.mark.parametrize(
    ("stops", "pieces", "want"),
    [
        (["###"], ["a#", "#", "b##", "#c"], ["a", "", "##b", ""]),
        (["\n\n"], ["x\n", "y\n", "\n"], ["x", "\ny", ""]),
        (["abcd", "bc"], ["ab", "cd"], ["", "a"]),
        (["bc", "abc"], ["xabc"], ["x"]),
        (["END", "STOP"], ["go STOP END"], ["go "]),
        ([], ["any", "thing"], ["any", "thing"]),
    ],
)
def test_stop_strings_by_example(stops: list[str], pieces: list[str], want: list[str]) -> None:
    one = StopStrings(stops)
    assert [one.push(piece)[0] for piece in pieces] == want


def test_after_a_stop_nothing_more_comes() -> None:
    one = StopStrings(["."])
    assert one.push("a.b") == ("a", True) and one.push("c") == ("", True) and one.flush() == ""


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 419), max_size=40), stop=st.text("e th€日\n", min_size=1, max_size=2))
def test_tokens_to_text_to_stop(ids: list[int], stop: str) -> None:
    """Both together: the whole text, cut at the stop string, though stop and characters straddle tokens."""
    one = peer("byte level")
    out, _ = stream([stop], shown(one, ids))
    assert out == cut(one.decode(ids), [stop])[0]
