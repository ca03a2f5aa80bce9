"""What a method that tells heads apart by what they recall is fitted on: texts with passkeys, and the mask of a head that streams."""

from __future__ import annotations

import torch
from torch import Tensor

from ...roles import Samples

WORDS = "amber bridge candle desert engine falcon garden hammer island jacket kettle ladder marble needle orange pepper quarry rabbit"
KEYS, LONG = 4, 6  # passkeys of so many words


def streams(count: int, sinks: int, window: int) -> Tensor:
    """What a streaming head sees beside the causal test, bool [N, N]."""
    back = torch.arange(count)[:, None] - torch.arange(count)
    return (back < window) | (torch.arange(count) < sinks)


def recall(samples: Samples, step: int, length: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """A text of about so many tokens that hides passkeys and ends by telling them, and the places whose states say the next word of one."""
    words = WORDS.split(" ")
    said = [" ".join(words[i] for i in torch.randint(len(words), (LONG,), generator=rng)) for _ in range(KEYS)]
    hidden = [samples.encode(f"\n\nPasskey {i + 1} is {key}.\n\n") for i, key in enumerate(said)]
    asked = [(samples.encode(f"\nPasskey {i + 1} is"), samples.encode(f" {key}.")) for i, key in enumerate(said)]
    straw = samples.texts[step % len(samples.texts)]
    room = max(length - sum(map(len, hidden)) - sum(len(a) + len(b) for a, b in asked), KEYS + 1)
    text: list[int] = straw.repeat(-(-room // len(straw)))[:room].tolist()
    ids: list[int] = []
    for i, key in enumerate(hidden):
        ids += text[i * room // (KEYS + 1) : (i + 1) * room // (KEYS + 1)] + key
    ids += text[KEYS * room // (KEYS + 1) :]
    places: list[int] = []
    for question, answer in asked:
        ids += question
        places += range(len(ids) - 1, len(ids) + len(answer) - 1)
        ids += answer
    return torch.tensor(ids), torch.tensor(places)
