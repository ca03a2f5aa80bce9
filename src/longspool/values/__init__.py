"""The frozen values that flow through the engine."""

from .blocks import Blocks
from .packed import Packed
from .rows import Rows
from .shape import Shape
from .span import Span
from .step import Step

__all__ = ["Blocks", "Packed", "Rows", "Shape", "Span", "Step"]
