"""`run`: one prompt, one answer (or n), the text to stdout and the facts to stderr; or everything as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import LongspoolError, ModelError
from . import show

if TYPE_CHECKING:
    from ..engine.sampler import Sampling
    from ..llm import LLM
    from ..report import Result


def opened(model: str, recipe: str, memory: str | None, kv: str, weights: str | None) -> LLM:
    """The model, loaded under a progress bar."""
    with show.Bar("starting") as bar:
        from ..llm import LLM

        return LLM(model, recipe, memory=memory, kv=kv, weights=weights, progress=bar.fraction)


def check(sampling: Sampling, as_json: bool) -> None:
    """Raises LongspoolError where the answer could not show what was asked for."""
    if sampling.logprobs is not None and not as_json:
        raise LongspoolError("--logprobs has no place in a plain answer; add --json.")


def tokens(llm: LLM, text: str, raw: bool) -> str | list[int]:
    """What the engine is given: the text itself, or a user's message in the model's chat format."""
    if raw:
        return text
    try:
        return llm.chat_ids([{"role": "user", "content": text}])
    except ModelError as error:
        raise LongspoolError(f"{error} Add --raw to give it the text as it is.") from None


def printed(llm: LLM, prompt: str | list[int], sampling: Sampling) -> None:
    """The answer as it comes, then the facts. With several answers they come together at the end."""
    if sampling.n == 1:
        results = [streamed(llm, prompt, sampling, sys.stdout.write)]
        print()
    else:
        results = llm.generate([prompt], sampling)
        print("\n\n".join(f"[{i}] {result.text}" for i, result in enumerate(results)))
    sys.stdout.flush()
    show.summary(results[0].report)


def as_json(llm: LLM, prompt: str | list[int], sampling: Sampling) -> None:
    """One object; with several answers it is the first one's, and `samples` holds the texts of all."""
    results = [streamed(llm, prompt, sampling)] if sampling.n == 1 else llm.generate([prompt], sampling)
    told: dict[str, object] = {"text": results[0].text, **results[0].report.to_dict()}
    if sampling.n > 1:
        told["samples"] = [result.text for result in results]
    if sampling.logprobs is not None:
        told["logprobs"] = [
            {"token": token, "logprob": own, "top": [list(pair) for pair in top]}
            for token, (own, top) in zip(results[0].tokens, results[0].logprobs, strict=True)
        ]
    print(json.dumps(told, ensure_ascii=False))


def streamed(
    llm: LLM,
    prompt: str | list[int],
    sampling: Sampling,
    write: Callable[[str], object] | None = None,
    heard: Callable[[], None] | None = None,
) -> Result:
    """One answer; `write` gets its pieces, `heard` is called after every step."""
    with show.Bar("reading the prompt") as bar:

        def watch(done: int, total: int) -> None:
            bar.tokens(done, total)
            if heard is not None:
                heard()

        for piece in llm.stream(prompt, sampling, watch=watch):
            if write is not None and piece.text:
                bar.stop()
                write(piece.text)
                sys.stdout.flush()
        assert piece.result is not None
        return piece.result
