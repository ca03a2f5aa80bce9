"""Methods that are fitted to a model before they can run on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from .method import Method
from .view import Samples


@dataclass(frozen=True)
class Fitted(Method):
    """A method on any seat that is fitted to a model once, ahead of use, by `longspool fit`. Its verbs find what `fit` gave in
    `fitted(self)` of their view, store or request. `file` takes another file than the one that `longspool fit` keeps."""

    file: str = field(default="", kw_only=True)

    shaping: ClassVar[tuple[str, ...]] = ()
    """The parameters on which what is fitted depends; all others may differ from those that it was fitted with."""

    def fit(self, samples: Samples) -> dict[str, Tensor]:
        """Tensors by name ("layer.name" for those of one layer) from the model's runs over text, of which it sees what
        `Needs.calibrated` names."""
        raise NotImplementedError

    def mould(self) -> tuple[object, ...]:
        """Methods with equal moulds are fitted to the same."""
        return (self.slug, self.file, *self.shape_of().items())

    def shape_of(self) -> dict[str, str]:
        """The values of the shaping parameters, as text."""
        return {name: repr(getattr(self, name)) for name in self.shaping}
