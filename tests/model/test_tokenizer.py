"""Tokenizers: GGUF vocabularies against sentencepiece, tokenizers, transformers and llama.cpp; end tokens; chat templates."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import sentencepiece
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2Tokenizer

from longspool.errors import ModelError
from longspool.model.gguf_file import GGUFFile, Value
from longspool.model.tokenizer import Tokenizer

TEXT = "\n".join(topics[name] for name in sorted(topics))
ODD = ["", " ", "  lead", "a  b   c\t\td\r\n\r\n x", "It's naïve ✓ 东京 ½ ①२ 🙂", "x = 12345 + 6.7e8\n\n    y", "DON'T SHOUT  at mixedCase"]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi there."}, {"role": "assistant", "content": "Hello!"}]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def byte_level(core: Core, pre: str, **more: Value) -> dict[str, Value]:
    """What a GGUF file says of a byte-level BPE."""
    described = json.loads(core.to_str())
    vocab = sorted(core.get_vocab().items(), key=lambda pair: pair[1])
    special = {token["content"] for token in described["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [token for token, _ in vocab],
        "tokenizer.ggml.token_type": [CONTROL if token in special else NORMAL for token, _ in vocab],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in described["model"]["merges"]],
        **{f"tokenizer.{key.replace('__', '.')}": value for key, value in more.items()},
    }


@pytest.fixture(scope="module")
def core() -> Core:
    """A byte-level BPE that has learned some English, split at white space only, so that merges can cross what the splitters cut."""
    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)])
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=2500, special_tokens=special, initial_alphabet=alphabet, max_token_length=8)
    core.train_from_iterator(TEXT[:120_000].splitlines(keepends=True), trainer)
    return core


def test_qwen_equals_transformers(core: Core) -> None:
    described = json.loads(core.to_str())["model"]
    peer = Qwen2Tokenizer(vocab=described["vocab"], merges=[tuple(pair) for pair in described["merges"]])
    ours = Tokenizer.from_gguf(byte_level(core, "qwen2"))
    for text in (TEXT[:60_000], *ODD, "e\u0301 is composed"):
        assert ours.encode(text) == peer.encode(text, add_special_tokens=False)
        assert ours.decode(ours.encode(text)) == peer.decode(peer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'s", " 12345", " C", "++", "\n\n ", " camelCase", ")/"]),
        ("smollm", ["It", "'s", " ", "1", "2", "3", "4", "5", " C", "++", "\n\n ", " camelCase", ")/"]),
        ("llama-bpe", ["It", "'s", " ", "123", "45", " C", "++\n\n", " ", " camelCase", ")/"]),
        ("qwen2", ["It", "'s", " ", "1", "2", "3", "4", "5", " C", "++\n\n", " ", " camelCase", ")/"]),
        ("tekken", ["It", "'s", " ", "1", "2", "3", "4", "5", " C", "++\n\n", " ", " camel", "Case", ")/"]),
        ("gpt-4o", ["It's", " ", "123", "45", " C", "++\n\n", " ", " camel", "Case", ")/"]),
    ],
)
def test_text_is_split_before_merging(pre: str, pieces: list[str], core: Core) -> None:
    splitter = Tokenizer.from_gguf(byte_level(core, pre))._core.pre_tokenizer
    found = [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece, _ in splitter.pre_tokenize_str("It's 12345 C++\n\n  camelCase)/")]
    assert found == pieces


def test_llama3_takes_whole_words_without_merges() -> None:
    metadata = byte_level(Core(models.BPE(vocab={"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4}, merges=[("a", "b")])), "gpt-2")
    assert Tokenizer.from_gguf(metadata).encode("abc") == [3, 2]
    assert Tokenizer.from_gguf(metadata | {"tokenizer.ggml.pre": "llama-bpe"}).encode("abc") == [4]


def spm_metadata(model: bytes, **more: Value) -> dict[str, Value]:
    """What a GGUF file says of a sentencepiece model."""
    spm = sentencepiece.SentencePieceProcessor(model_proto=model)
    kinds = []
    for i in range(spm.vocab_size()):
        user = spm.id_to_piece(i) == "<user>"
        marked = {spm.is_byte(i): BYTE, spm.is_control(i): CONTROL, spm.is_unknown(i): UNKNOWN, user: USER_DEFINED}
        kinds.append(marked.get(True, NORMAL))
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [spm.id_to_piece(i) for i in range(spm.vocab_size())],
        "tokenizer.ggml.scores": [spm.get_score(i) for i in range(spm.vocab_size())],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": spm.bos_id(),
        "tokenizer.ggml.eos_token_id": spm.eos_id(),
        "tokenizer.ggml.unknown_token_id": spm.unk_id(),
        **more,
    }


@pytest.fixture(scope="module")
def train() -> Callable[[bool], bytes]:
    def make(prefix: bool) -> bytes:
        out = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXT[:80_000].splitlines()),
            model_writer=out,
            model_type="bpe",
            vocab_size=900,
            byte_fallback=True,
            add_dummy_prefix=prefix,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=["<user>"],
            character_coverage=0.98,
            minloglevel=2,
        )
        return out.getvalue()

    return make


@pytest.mark.parametrize("prefix", [True, False], ids=["llama", "gemma"])
def test_sentencepiece_vocabulary_equals_sentencepiece(prefix: bool, train: Callable[[bool], bytes]) -> None:
    model = train(prefix)
    peer = sentencepiece.SentencePieceProcessor(model_proto=model)
    more: dict[str, Value] = {} if prefix else {"tokenizer.ggml.add_space_prefix": False, "general.architecture": "gemma3"}
    ours = Tokenizer.from_gguf(spm_metadata(model) | more)
    # A long text without a line break is one word to sentencepiece; lines keep its quadratic merging short.
    for text in (*TEXT[40_000:80_000].splitlines(), *(odd for odd in ODD if odd)):
        ids = peer.encode(text)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == peer.decode(ids)
    assert any(peer.is_byte(i) for i in peer.encode(ODD[4]))
    assert ours.encode("a", special=True) == [peer.bos_id(), *ours.encode("a")]
    assert ours.encode("<user>", special=False).count(peer.piece_to_id("<user>")) == 1


def test_gemma_spells_runs_of_spaces_as_spaces(train: Callable[[bool], bytes]) -> None:
    metadata = spm_metadata(train(False)) | {"tokenizer.ggml.add_space_prefix": False, "general.architecture": "gemma3"}
    want = Tokenizer.from_gguf(metadata).encode("a    b")
    tokens = metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list) and "▁▁▁▁" in tokens
    spelled = [" " * len(str(t)) if set(str(t)) == {"▁"} and len(str(t)) > 1 else t for t in tokens]
    assert Tokenizer.from_gguf(metadata | {"tokenizer.ggml.tokens": spelled}).encode("a    b") == want


def test_phi3_control_tokens_swallow_the_space_after_them(train: Callable[[bool], bytes]) -> None:
    metadata = spm_metadata(train(True))
    kinds = list(metadata["tokenizer.ggml.token_type"])  # type: ignore[arg-type]
    user = list(metadata["tokenizer.ggml.tokens"]).index("<user>")  # type: ignore[arg-type]
    kinds[user] = CONTROL
    metadata |= {"tokenizer.ggml.token_type": kinds}
    plain, phi = (Tokenizer.from_gguf(metadata | {"general.architecture": arch}) for arch in ("llama", "phi3"))
    assert phi.encode("<user>\nhi") == phi.encode("<user>hi") == plain.encode("<user>hi") != plain.encode("<user>\nhi")


def test_ends_and_openings(core: Core) -> None:
    ids = {"ggml__bos_token_id": 1, "ggml__eos_token_id": 0, "ggml__eot_token_id": 7}
    plain = Tokenizer.from_gguf(byte_level(core, "gpt-2", **ids))
    assert (plain.bos, plain.eos, plain.vocab_size) == (1, (0, 2, 7), 2500)  # <|im_end|> is 2
    assert plain.encode("hi", special=True) == plain.encode("hi")
    both = Tokenizer.from_gguf(byte_level(core, "gpt-2", **ids, ggml__add_bos_token=True, ggml__add_eos_token=True))
    assert both.encode("hi", special=True) == [1, *plain.encode("hi"), 0]
    assert Tokenizer.from_gguf(byte_level(core, "llama-bpe", **ids)).encode("", special=True) == [1]
    assert Tokenizer.from_gguf(byte_level(core, "gpt-2")).bos is None


def test_control_tokens_in_text_and_out_of_it(core: Core) -> None:
    ours = Tokenizer.from_gguf(byte_level(core, "gpt-2"))
    ids = ours.encode("<|im_start|>hi<|im_end|>")
    assert ids[0] == 1 and ids[-1] == 2
    assert ours.decode(ids) == "hi" and ours.decode(ids, special=True) == "<|im_start|>hi<|im_end|>"


TEMPLATE = (
    "{{ bos_token }}{%- if tools %}TOOLS {{ tools | tojson }}\n{% endif %}"
    "{%- for message in messages %}\n{%- if message['role'] not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('Only three roles are known') }}{% endif %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}


@pytest.fixture
def directory(core: Core, tmp_path: Path) -> Path:
    """A Hugging Face tokenizer directory."""
    whole = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<|im_start|>", eos_token="<|endoftext|>")
    whole.chat_template = TEMPLATE
    whole.save_pretrained(str(tmp_path))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 300]}')
    return tmp_path


def test_chat_equals_transformers(core: Core, directory: Path) -> None:
    peer = AutoTokenizer.from_pretrained(str(directory))
    ours = Tokenizer.from_directory(directory, {})
    gguf = Tokenizer.from_gguf(byte_level(core, "gpt-2", ggml__bos_token_id=1, chat_template=TEMPLATE))
    for tools in (None, [TOOL]):
        for opened in (True, False):
            want = peer.apply_chat_template(CHAT, tools=tools, add_generation_prompt=opened, tokenize=False)
            assert ours.render(CHAT, opened, tools) == gguf.render(CHAT, opened, tools) == want
            assert ours.chat(CHAT, opened, tools) == peer.encode(want, add_special_tokens=False)
            assert ours.decode(gguf.chat(CHAT, opened, tools), special=True) == want
    assert len(ours.chat(CHAT)) > len(ours.chat(CHAT, False))


def test_chat_mistakes_are_sentences(core: Core, directory: Path) -> None:
    with pytest.raises(ModelError, match=r"no chat template, so it takes plain prompts"):
        Tokenizer.from_gguf(byte_level(core, "gpt-2")).chat(CHAT)
    with pytest.raises(ModelError, match=r"template refuses these messages: Only three roles are known\."):
        Tokenizer.from_directory(directory, {}).chat([{"role": "ghost", "content": "boo"}])


def test_template_for_tools_is_taken_where_there_are_tools(core: Core) -> None:
    ours = Tokenizer.from_gguf(byte_level(core, "gpt-2", chat_template="plain", chat_template__tool_use="with tools"))
    assert (ours.render(CHAT), ours.render(CHAT, tools=[TOOL])) == ("plain", "with tools")


def test_directory(core: Core, directory: Path) -> None:
    ours = Tokenizer.from_directory(directory, {"eos_token_id": 301})
    assert (ours.bos, ours.eos, ours.vocab_size) == (1, (0, 2, 300, 301), 2500)
    for text in (TEXT[:20_000], *ODD):
        assert ours.encode(text) == core.encode(text).ids and ours.decode(ours.encode(text)) == text


def test_directory_mistakes_are_sentences(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(ModelError, match=r"holds no tokenizer: one of tokenizer\.json"):
        Tokenizer.from_directory(tmp_path_factory.mktemp("empty"), {})
    whole = (directory / "tokenizer.json").read_text()
    for broken in (whole[:1000], "[]", "{}"):
        (directory / "tokenizer.json").write_text(broken)
        with pytest.raises(ModelError) as error:
            Tokenizer.from_directory(directory, {})
        assert "\n" not in str(error.value) and "tokenizer" in str(error.value)


def test_sentencepiece_directory_without_protobuf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    monkeypatch.setattr("longspool.model.tokenizer._has_protobuf", lambda: False)
    with pytest.raises(ModelError, match=r"only a sentencepiece tokenizer\.model, whose conversion needs protobuf: `pip install protobuf`"):
        Tokenizer.from_directory(tmp_path, {})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tokenizer.ggml.model": "t5"}, "tokenizer is of kind 't5'; known are 'gpt2' and 'llama'"),
        ({"tokenizer.ggml.pre": "klingon"}, "splits text the way 'klingon', which is not known; known are"),
        ({"tokenizer.ggml.merges": ["a q!"]}, "the merge 'a q!' has parts that are no tokens"),
        ({"tokenizer.ggml.tokens": None}, r"lack the list tokenizer\.ggml\.tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "a number for each of the 2500 tokens"),
        ({"tokenizer.ggml.bos_token_id": 9999, "tokenizer.ggml.add_bos_token": True}, "bos token is number 9999"),
    ],
)
def test_gguf_mistakes_are_sentences(change: dict[str, Value], text: str, core: Core) -> None:
    with pytest.raises(ModelError, match=text):
        Tokenizer.from_gguf({k: v for k, v in (byte_level(core, "gpt-2") | change).items() if v is not None})


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_gguf(GGUFFile(smollm2).metadata)


@pytest.mark.real
def test_smollm2_reads_and_writes(real: Tokenizer) -> None:
    assert real.decode(real.encode(TEXT)) == TEXT
    assert (real.bos, real.eos, real.vocab_size) == (1, (0, 2), 49152)
    # As llama.cpp tokenizes: digits stand alone, and the spaces before them stay together.
    assert real.encode("   12 3\n\n  4") == [333, 33, 34, 216, 35, 39892, 36]
    assert real.encode("It's naïve ✓ 东京") == [1589, 506, 15486, 46494, 4636, 246, 237, 216, 7906, 246, 16736, 122]


@pytest.fixture(scope="module")
def peer(smollm2: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(str(smollm2.parent), gguf_file=smollm2.name)


@pytest.mark.slow
@pytest.mark.real
def test_smollm2_equals_transformers(real: Tokenizer, peer: PreTrainedTokenizerBase) -> None:
    # transformers' conversion does not know that this vocabulary cuts off digits first, so a run of spaces before one differs.
    same = [line for line in TEXT.splitlines(keepends=True) if not re.search(r"\s\s\d", " " + line)]
    assert sum(map(len, same)) > 0.98 * len(TEXT)
    for line in same:
        assert real.encode(line) == peer.encode(line, add_special_tokens=False)
    for opened in (True, False):
        want = peer.apply_chat_template(CHAT, add_generation_prompt=opened, tokenize=False)
        assert real.render(CHAT, opened) == want
        assert real.chat(CHAT, opened) == peer.encode(want, add_special_tokens=False)


@pytest.mark.slow
@pytest.mark.real
def test_smollm2_equals_llama_cpp(real: Tokenizer, smollm2: Path) -> None:
    llama = pytest.importorskip("llama_cpp").Llama(str(smollm2), vocab_only=True, verbose=False)
    for text in (TEXT, *ODD):
        assert real.encode(text) == llama.tokenize(text.encode(), add_bos=False, special=True)
