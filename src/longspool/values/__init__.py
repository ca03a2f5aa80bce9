"""The frozen values that flow through the engine."""

from .blocks import Blocks
from .rows import Rows
from .shape import Shape
from .step import Step

__all__ = ["Blocks", "Rows", "Shape", "Step"]
