"""The same token ids for every peer: real English cut to exact lengths, and ten needle prompts. Made once, by its own process."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LENGTHS = {"256": 256, "1k": 1024, "4k": 4096, "7.5k": 7680}  # 256 is there to try the harness, not to compare
WARM = 1200  # long enough that a method with a budget of 1024 tokens acts, and its kernels are compiled
FORCED = 128  # tokens of real text after the prompt on which top-1 choices are compared
NEEDLE_LENGTH = 4096
ANSWER = 16  # tokens left for a needle's answer

KEYS = ("harbour", "violin", "glacier", "lantern", "orchard", "compass", "meadow", "furnace", "pebble", "saddle")
TASK = (
    "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the number "
    "afterwards.\n{text}\nWhat is the special magic number for {key} mentioned in the provided text?"
)
NEEDLE = " One of the special magic numbers for {key} is: {answer}."
PREFIX = "The special magic number for {key} mentioned in the provided text is"


@dataclass(frozen=True)
class Needle:
    """A prompt that hides a number at `depth` (0 to 1) and ends where the model has to say it."""

    ids: list[int]
    key: str
    answer: str
    depth: float


@dataclass(frozen=True)
class Prompts:
    """All that a job feeds to a peer. `text` is longer than any prompt; `pieces[id]` is a token's text."""

    text: list[int]
    needles: list[Needle]
    pieces: list[str]

    @property
    def sha(self) -> str:
        """Which text it was: the standard library's pages differ between Python versions."""
        flat = json.dumps([self.text, [n.ids for n in self.needles]]).encode()
        return hashlib.sha256(flat).hexdigest()[:16]

    @property
    def warm(self) -> list[int]:
        """A prompt that shares no prefix with the measured ones."""
        return self.text[-WARM:]

    def prompt(self, length: int) -> list[int]:
        return self.text[:length]

    def forced(self, length: int) -> list[int]:
        return self.text[length : length + FORCED]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.pieces[i] for i in ids)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


def read(path: Path) -> Prompts:
    raw = json.loads(path.read_text())
    return Prompts(raw["text"], [Needle(**n) for n in raw["needles"]], raw["pieces"])


def make(model: Path) -> Prompts:
    from transformers import AutoTokenizer

    from longspool.bench.texts import english

    tokenizer = AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
    ids = tokenizer(english(), add_special_tokens=False)["input_ids"]
    room = max(LENGTHS.values()) + FORCED
    text = ids[:room] + ids[-WARM:]
    hay = ids[room:]
    needles = [_needle(tokenizer, hay, i) for i in range(len(KEYS))]
    pieces = [t.replace("Ġ", " ").replace("Ċ", "\n") for t in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))]
    return Prompts(text, needles, pieces)


def _needle(tokenizer: PreTrainedTokenizerBase, hay: list[int], number: int) -> Needle:
    """Exactly NEEDLE_LENGTH - ANSWER tokens: the haystack gives way to the needle, the question and the chat template."""
    key, depth = KEYS[number], (number + 0.5) / len(KEYS)
    answer = str(1_000_003 + (number + 3) * 7_368_787 % 8_999_993)
    hole = "<HAYSTACK>"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": TASK.format(text=hole, key=key)}], tokenize=False, add_generation_prompt=True
    )
    before, after = (chat + PREFIX.format(key=key)).split(hole)
    head, tail, needle = (
        tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after, NEEDLE.format(key=key, answer=answer))
    )
    room = NEEDLE_LENGTH - ANSWER - len(head) - len(tail) - len(needle)
    straw = hay[number * 997 : number * 997 + room]
    dot = tokenizer(".", add_special_tokens=False)["input_ids"][0]
    ends = [i + 1 for i, t in enumerate(straw) if t == dot] or [room]
    cut = min(ends, key=lambda i: abs(i - depth * room))
    return Needle(head + straw[:cut] + needle + straw[cut:] + tail, key, answer, depth)


if __name__ == "__main__":
    make(Path(sys.argv[1])).save(Path(sys.argv[2]))
