"""The tokenizer that a GGUF file's metadata describe: a vocabulary with its merges or scores, and the name of the text splitter.

transformers converts these too, but takes seconds for a small vocabulary and knows no splitter for several families, "smollm" among
them, which changes the tokens of numbers after spaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ..errors import ModelError
from .gguf_file import Value

_CONTROL, _USER_DEFINED = 3, 4
_WORD = "\u2581"  # sentencepiece's visible space

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATHS = _SIGNS.replace(r"[\r\n]*", r"[\r\n/]*")
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(ending: str) -> str:
    """Words that are cut where lower case turns into upper case."""
    first = r"[^\r\n\p{L}\p{N}]?"
    return f"{first}{_UPPER}*{_LOWER}+{ending}|{first}{_UPPER}+{_LOWER}*{ending}"


_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS}"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_SIGNS}"
_TEKKEN = rf"{_cased('')}|\p{{N}}|{_PATHS}"
_GPT4O = rf"{_cased(_CONTRACTIONS + '?')}|\p{{N}}{{1,3}}|{_PATHS}"

# The names under which llama.cpp files say how text was split before the merges were learned.
_SPLITS = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
}
_GPT2 = ("gpt-2", "gpt2", "default", "olmo", "mpt")
_DIGITS = ("smollm", "starcoder", "refact")  # GPT-2's, after every digit is cut off by itself
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken", "pixtral")  # a word of the vocabulary is taken without its merges


def convert(metadata: Mapping[str, Value]) -> Tokenizer:
    """The file's tokenizer. Raises ModelError where a part is missing or of a kind that is not known."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(metadata)
    elif kind == "llama":
        tokenizer = _sentencepiece(metadata)
    else:
        raise ModelError(f"The GGUF file's tokenizer is of kind {kind!r}; known are 'gpt2' and 'llama'.")
    _add_tokens(tokenizer, metadata)
    _add_ends(tokenizer, metadata)
    return tokenizer


def _texts(metadata: Mapping[str, Value], key: str) -> list[str]:
    found = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise ModelError(f"The GGUF metadata lack the list tokenizer.ggml.{key}.")
    return found  # type: ignore[return-value]


def _numbers(metadata: Mapping[str, Value], key: str, count: int) -> list[float]:
    found = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(found, list) or len(found) != count or not all(isinstance(x, (int, float)) for x in found):
        raise ModelError(f"The GGUF metadata lack the list tokenizer.ggml.{key} with a number for each of the {count} tokens.")
    return found  # type: ignore[return-value]


def _byte_level(metadata: Mapping[str, Value]) -> Tokenizer:
    vocab = {token: i for i, token in enumerate(_texts(metadata, "tokens"))}
    merges = []
    for merge in _texts(metadata, "merges"):
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelError(f"The GGUF tokenizer is damaged: the merge {merge!r} has parts that are no tokens.")
        merges.append((left, right))
    splitter = str(metadata.get("tokenizer.ggml.pre", "default"))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=splitter in _WHOLE_WORDS))
    tokenizer.pre_tokenizer = _splitter(splitter)
    tokenizer.decoder = decoders.ByteLevel()
    if _SPLITS.get(splitter) is _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _splitter(name: str) -> pre_tokenizers.PreTokenizer:
    if name in _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in _DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if name in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[name]), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    known = ", ".join(sorted((*_SPLITS, *_GPT2, *_DIGITS)))
    raise ModelError(f"The GGUF file's tokenizer splits text the way {name!r}, which is not known; known are {known}.")


def _sentencepiece(metadata: Mapping[str, Value]) -> Tokenizer:
    tokens = [_WORD * len(t) if t and not t.strip(" ") else t for t in _texts(metadata, "tokens")]
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(
        vocab=vocab,
        merges=_merges(vocab, _ranks(metadata, tokens)),
        unk_token=tokens[unknown] if isinstance(unknown, int) and unknown < len(tokens) else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", _WORD)
    back = [decoders.Replace(_WORD, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_WORD), spaces])
        back.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(back)
    return tokenizer


def _ranks(metadata: Mapping[str, Value], tokens: list[str]) -> list[float]:
    """When each token is merged, the smallest first. Gemma's files carry scores that do not tell; there the order of tokens does."""
    if str(metadata.get("general.architecture", "")).startswith("gemma"):
        return list(range(len(tokens)))
    return [-score for score in _numbers(metadata, "scores", len(tokens))]


def _merges(vocab: Mapping[str, int], ranks: list[float]) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token, in the order in which sentencepiece would merge them."""
    found = []
    for token, i in vocab.items():
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                found.append((ranks[i], left, right, token, cut))
    found.sort()
    return [(token[:cut], token[cut:]) for *_, token, cut in found]


def _add_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Value]) -> None:
    """Tokens that are matched whole in the text: control tokens, which decoding can leave out, and user-defined ones."""
    tokens = _texts(metadata, "tokens")
    if "tokenizer.ggml.token_type" not in metadata:
        return
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    kinds = _numbers(metadata, "token_type", len(tokens))
    # Phi-3's control tokens swallow the white space after them, which no key of the file says.
    swallow = metadata.get("general.architecture") == "phi3" and metadata.get("tokenizer.ggml.model") == "llama"
    keep = ("<unk>", "<s>", "<|endoftext|>")

    def of(kind: int, special: bool) -> Iterable[AddedToken]:
        for token, its in zip(tokens, kinds, strict=True):
            if its == kind and token in vocab:
                yield AddedToken(token, normalized=False, special=special, rstrip=swallow and special and token not in keep)

    tokenizer.add_special_tokens(list(of(_CONTROL, True)))
    tokenizer.add_tokens(list(of(_USER_DEFINED, False)))


def _add_ends(tokenizer: Tokenizer, metadata: Mapping[str, Value]) -> None:
    """What `special=True` puts around a text."""
    default = metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS
    ends = {"bos": _end(tokenizer, metadata, "bos", default), "eos": _end(tokenizer, metadata, "eos", False)}
    named = [{"id": end, "ids": [number], "tokens": [token]} for end, found in ends.items() if found for token, number in [found]]
    if named:
        order = [part for part in ("bos", "$A", "eos") if part == "$A" or ends[part]]
        tokenizer.post_processor = processors.TemplateProcessing(single=order, special_tokens=named)


def _end(tokenizer: Tokenizer, metadata: Mapping[str, Value], end: str, default: bool) -> tuple[str, int] | None:
    """The token that opens or closes a text and its number, where there is one."""
    number = metadata.get(f"tokenizer.ggml.{end}_token_id")
    if not isinstance(number, int) or not metadata.get(f"tokenizer.ggml.add_{end}_token", default):
        return None
    token = tokenizer.id_to_token(number)
    if token is None:
        raise ModelError(f"The GGUF tokenizer is damaged: its {end} token is number {number}, which there is not.")
    return token, number
