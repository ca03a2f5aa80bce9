"""int8: KV codes of 8 bits, symmetric; keys per channel of a page, values per token.

Key channels differ widely in scale and values don't, which is why KIVI quantizes keys along tokens and values along channels. Attention
reads the codes: the key scale is folded into the query once a page.  k = s_d * code,  v = s_t * code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...method import Paper, Trial
from .base import Codes


@dataclass(frozen=True)
class Int8(Codes):
    bits: ClassVar[int] = 8
    paper: ClassVar[Paper] = Paper(
        "", "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", "arXiv:2402.02750", "keys per channel, values per token"
    )
    identity: ClassVar[float] = 0.02
    trials: ClassVar[tuple[Trial, ...]] = (Trial("int8", within=0.005, claim="Eight bits lose next to nothing."),)
