"""Text to tokens and back, and chat messages to tokens."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers

from ..errors import ModelError
from .checkpoint import read_json
from .gguf_file import Value
from .gguf_tokenizer import convert

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, object]

# Control tokens with which the known families end a turn or a text. Configs often name only one of theirs.
_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<end_of_turn>",
    "<|end|>",
    "<eos>",
    "</s>",
)
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


class Tokenizer:
    """A model's tokenizer. `bos` is its opening token or None, `eos` every token that ends an answer."""

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        named: Mapping[str, str],
        template: str | Mapping[str, str] | None,
        eos: Iterable[int] = (),
        renderer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self._core = core
        self._named = dict(named)
        self._template = template
        self._made = renderer
        self.vocab_size: int = core.get_vocab_size()
        self.bos: int | None = core.token_to_id(named["bos_token"]) if "bos_token" in named else None
        special = {token.content: i for i, token in core.get_added_tokens_decoder().items() if token.special}
        named_end = core.token_to_id(named["eos_token"]) if "eos_token" in named else None
        ends = {*eos, named_end, *(special.get(end) for end in _ENDS)} - {None}
        self.eos: tuple[int, ...] = tuple(sorted(end for end in ends if end is not None))

    @staticmethod
    def from_gguf(metadata: Mapping[str, Value]) -> Tokenizer:
        """The tokenizer and chat template that a GGUF file's metadata describe."""
        core = convert(metadata)
        ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom", "unknown", "padding")}
        whole = {name: i for name, i in ids.items() if isinstance(i, int)}
        spelled = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
        named = {spelled[name]: token for name, i in whole.items() if name in spelled and (token := core.id_to_token(i))}
        prefix = "tokenizer.chat_template"
        templates = {key[len(prefix) + 1 :]: str(text) for key, text in metadata.items() if key.startswith(prefix + ".")}
        if prefix in metadata:
            templates["default"] = str(metadata[prefix])
        return Tokenizer(core, named, templates or None, (whole[name] for name in ("eos", "eot", "eom") if name in whole))

    @staticmethod
    def from_directory(path: Path, config: Mapping[str, object]) -> Tokenizer:
        """The tokenizer of a Hugging Face directory; its config and generation_config name more end tokens."""
        if not any((path / name).is_file() for name in _FILES):
            raise ModelError(f"{path} holds no tokenizer: one of {', '.join(_FILES)} is expected.")
        if (path / "tokenizer.json").is_file():
            read_json(path / "tokenizer.json", "the tokenizer")  # damage is told here in a sentence
        elif (path / "tokenizer.model").is_file() and not _has_protobuf():
            raise ModelError(f"{path} has only a sentencepiece tokenizer.model, whose conversion needs protobuf: `pip install protobuf`.")
        from transformers import AutoTokenizer, PreTrainedTokenizerFast  # a second's import, which a GGUF model needs only to chat

        try:
            whole = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
            raise ModelError(f"The tokenizer in {path} can't be read: {_first_line(error)}.") from None
        if not isinstance(whole, PreTrainedTokenizerFast):
            raise ModelError(f"The tokenizer in {path} has no fast form (tokenizer.json), which is needed.")
        extra = read_json(path / "generation_config.json", "generation settings") if (path / "generation_config.json").is_file() else {}
        eos = (*_ids(config.get("eos_token_id")), *_ids(extra.get("eos_token_id")))
        named = {name: token for name, token in whole.special_tokens_map.items() if isinstance(token, str)}
        return Tokenizer(whole.backend_tokenizer, named, whole.chat_template, eos, whole)

    def encode(self, text: str, special: bool = False) -> list[int]:
        """The tokens of a text; with `special`, between the tokens that the model expects around a text. Marks such as <|im_end|>
        in the text become their control tokens."""
        return self._core.encode(text, add_special_tokens=special).ids

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """The text of tokens, without control tokens unless `special`. Nothing is tidied up."""
        return self._core.decode(list(ids), skip_special_tokens=not special)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True, tools: Sequence[Message] | None = None) -> str:
        """Chat messages ({"role", "content"}) as the model's template writes them. Raises ModelError where it can't."""
        from jinja2 import TemplateError

        if self._template is None:
            raise ModelError("This model has no chat template, so it takes plain prompts and no messages.")
        try:
            text = self._renderer().apply_chat_template(
                [dict(message) for message in messages],  # type: ignore[arg-type]
                tools=None if tools is None else [dict(tool) for tool in tools],
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise ModelError(f"The model's chat template refuses these messages: {_first_line(error)}.") from None
        return str(text)

    def chat(self, messages: Sequence[Message], add_generation_prompt: bool = True, tools: Sequence[Message] | None = None) -> list[int]:
        """The tokens of chat messages, with the opening of the answer unless told otherwise."""
        return self.encode(self.render(messages, add_generation_prompt, tools))

    def _renderer(self) -> PreTrainedTokenizerBase:
        """What fills in the chat template."""
        if self._made is None:
            from transformers import PreTrainedTokenizerFast

            self._made = PreTrainedTokenizerFast(tokenizer_object=self._core, **self._named)  # type: ignore[no-untyped-call]
            self._made.chat_template = self._template
        return self._made


def _has_protobuf() -> bool:
    return importlib.util.find_spec("google") is not None and importlib.util.find_spec("google.protobuf") is not None


def _ids(value: object) -> list[int]:
    """One token id, several or none."""
    values = value if isinstance(value, list) else [value]
    return [i for i in values if isinstance(i, int)]


def _first_line(error: BaseException) -> str:
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    return (text.strip().splitlines() or [type(error).__name__])[0].rstrip(".")
