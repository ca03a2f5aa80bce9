"""The errors a user can meet. Each says what was asked, what there is and what would work."""

from __future__ import annotations


class LongspoolError(ValueError):
    """A mistake that the user can mend; the command line shows its text alone and exits with 2."""


class PlanError(LongspoolError):
    """A recipe that can't run. `reasons` lists every problem, one sentence each."""

    def __init__(self, *reasons: str, nearest: str = "") -> None:
        self.reasons = reasons
        hint = f" The nearest sound recipe: {nearest}" if nearest else ""
        super().__init__(" ".join(reasons) + hint)


class PromptTooLong(LongspoolError):
    """The prompt and the answer do not fit into the model's context."""


class OutOfMemory(LongspoolError):
    """The request needs more KV bytes than the budget could ever give it."""


class ModelError(LongspoolError):
    """A model that can't be found, read or understood."""


class MemoryFileError(LongspoolError):
    """A saved memory that is damaged, or belongs to another model or recipe."""
