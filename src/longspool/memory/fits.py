"""What the methods of an engine were fitted to its model: one copy for all requests, forks and saved memories."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..errors import PlanError
from ..method import Method
from ..roles import Fitted
from ..values.fit import Fit


class Fits(dict[Method, Fit]):
    """By method. Methods that differ in nothing that shapes a fit share one."""

    def __missing__(self, method: Method) -> Fit:
        raise PlanError(f"{method.slug} is used before what it was fitted to was loaded; `longspool fit {method.slug}` makes it.")

    def like(self, method: Fitted) -> Fit | None:
        """What a method is known to be fitted to, or another one that only differs in what does not matter here."""
        same = (fit for known, fit in self.items() if isinstance(known, Fitted) and known.mould() == method.mould())
        return next(same, None)

    def forget(self, method: Fitted) -> None:
        """Drop what was known for it and for its like."""
        for known in [k for k in self if isinstance(k, Fitted) and k.mould() == method.mould()]:
            del self[known]

    def of(self, methods: Iterable[Method]) -> list[Fit]:
        """The fits of these methods and of those that they wrap, each once."""
        return list({id(self[m]): self[m] for m in fitted_in(methods)}.values())


def fitted_in(methods: Iterable[Method]) -> Sequence[Fitted]:
    """The methods that are fitted, those within others too."""
    found: list[Fitted] = []
    for method in methods:
        found += [method] if isinstance(method, Fitted) else []
        found += fitted_in(method.wrapped())
    return found
