"""`fit`: a method fitted to a model, and what came of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from . import answer, show, texts


def fit(method: str, model: str, weights: str | None, files: Sequence[Path], tokens: int, seed: int, as_json: bool) -> None:
    """The file's path, or everything as JSON."""
    text = texts.context(files) if files else ""
    llm = answer.opened(model, "", None, "f16", weights)
    with show.Bar(f"fitting {method}") as bar:
        done = llm.fit(method, text=text, tokens=tokens, seed=seed, progress=lambda share: bar.fraction(share, f"fitting {method}"))
    if as_json:
        print(json.dumps(dataclasses.asdict(done) | {"path": str(done.path)}))
        return
    print(done.path)
    facts = f"{done.method}: {done.tensors} tensors, {show.size(done.nbytes)}, from {done.tokens:,} tokens in {done.seconds:.1f} s"
    show.console().print(facts, style="dim", markup=False)
