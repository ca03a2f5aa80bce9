"""Longspool itself, under several recipes. The token loop is that of LLM.stream, without its text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from longspool import LLM, Report

PACKAGES = ("longspool", "torch", "numba")
INSTALL = "pip install -e ."


@dataclass(frozen=True)
class Settings:
    recipe: str = ""


VARIANTS = {
    "dense": Settings(),
    "int8": Settings("int8"),
    "int4": Settings("int4"),
    "quest-int8": Settings("quest(budget=1024) + int8"),
    "snapkv-int8": Settings("snapkv(budget=1024) + int8"),
    "trianglemix": Settings("trianglemix"),
}
EXACT = ("dense",)


class Longspool:
    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.last: Report | None = None

    def stream(self, ids: Sequence[int], tokens: int, seen: Callable[[int], None]) -> None:
        from longspool.engine.request import State
        from longspool.report import result

        (request,) = self.llm.requests(list(ids), None, None, max_tokens=tokens, ignore_eos=True)
        engine, told = self.llm.engine, 0
        engine.pools.ledger.mark()
        engine.submit(request)
        while request.state is not State.DONE:
            engine.step()
            for choice in request.choices[told:]:
                seen(choice.token)
            told = len(request.choices)
        if request.error is not None:
            raise request.error
        self.last = result(request, engine.pools).report

    def forced(self, ids: Sequence[int], forced: Sequence[int]) -> np.ndarray:
        """The prompt is prefilled; every forced token but the last goes through a decode step of its own."""
        import torch

        from longspool.engine.score import teacher_forced

        pieces = teacher_forced(self.llm.engine, [*ids, *forced[:-1]], len(ids), self.llm.plan)
        rows = [piece[-1:].clone() for piece in pieces]
        return torch.cat(rows[-len(forced) :]).numpy()

    def report(self) -> dict[str, object]:
        """What the engine says of its last run."""
        assert self.last is not None
        told = self.last.to_dict()
        return {name: told[name] for name in ("recipe", "memory", "actions", "kernels", "notes")}


def open(model: Path, settings: Settings, threads: int) -> Longspool:
    import torch

    from longspool import LLM

    torch.set_num_threads(threads)
    return Longspool(LLM(str(model), settings.recipe))
