"""int4: KV codes of 4 bits with a zero point; keys per channel of a page, values per token.

As int8 with half the bytes:  k = s_d * code + z_d,  v = s_t * code + z_t.  KIVI's groups are 32 tokens; ours are a page (64).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...method import Paper, Trial
from .base import Codes


@dataclass(frozen=True)
class Int4(Codes):
    bits: ClassVar[int] = 4
    paper: ClassVar[Paper] = Paper(
        "", "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", "arXiv:2402.02750", "keys per channel, values per token"
    )
    identity: ClassVar[float] = 0.2
    trials: ClassVar[tuple[Trial, ...]] = (Trial("int4", within=0.1, claim="Four bits lose little."),)
