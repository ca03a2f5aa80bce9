"""Every op's samples through every implementation, compared with ref.py."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from longspool import kernels
from longspool.values import Packed
from toolbox import TRITON, send


def tensors(value: object) -> Iterator[Tensor]:
    """All tensors of a result or of arguments, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors(part)
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))


def compare(name: str, got: object, want: object, tolerance: tuple[float, float]) -> None:
    found, expected = list(tensors(got)), list(tensors(want))
    assert len(found) == len(expected), f"{name}: {len(found)} tensors, not {len(expected)}"
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        exact = tolerance == (0.0, 0.0)
        torch.testing.assert_close(
            a,
            b,
            atol=0.0 if exact else tolerance[0],
            rtol=0.0 if exact else tolerance[1],
            equal_nan=True,
            msg=lambda text, i=i: f"{name}, tensor {i}: {text}",
        )


def run(op: str, kind: str, args: tuple, kw: dict) -> tuple[object, tuple]:
    """The result and the arguments as they are afterwards, since some ops write in place; on the CPU."""
    args, kw = placed(kind, tuple(a if isinstance(a, Packed) else copy.deepcopy(a) for a in args), kw)
    result = kernels.implementation(op, kind).run(*args, **kw)
    return send((result, args), "cpu")


def placed(kind: str, args: tuple, kw: dict) -> tuple[tuple, dict]:
    """The arguments where an implementation of this kind takes them."""
    return send((args, kw), TRITON if kind == "gpu" else "cpu")


def module(op: str, kind: str) -> None:
    try:
        kernels.implementation(op, kind)
    except LookupError as missing:
        pytest.skip(str(missing))


@pytest.mark.parametrize("op", kernels.names)
def test_contract_is_written(op: str) -> None:
    spec = importlib.import_module(f"longspool.kernels.{op}.spec")
    assert spec.__doc__ and spec.__doc__.startswith(f"{op}("), f"{op}/spec.py begins with the call it describes"
    names = [name for name, _, _ in spec.samples()]
    assert len(names) >= 3 and len(set(names)) == len(names)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("op", kernels.names)
def test_equals_ref(op: str, kind: str, threads: int, spoiled_memory: None) -> None:
    module(op, kind)
    if kind == "gpu" and threads > 1:
        pytest.skip("threads are the CPU's")
    spec = importlib.import_module(f"longspool.kernels.{op}.spec")
    served, before = 0, torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for name, args, kw in spec.samples():
            there, more = placed(kind, args, kw)
            if kernels.implementation(op, kind).can(*there, **more) is None:
                served += 1
                compare(f"{op} {kind} {name}", run(op, kind, args, kw), run(op, "ref", args, kw), spec.TOLERANCE)
        assert torch.get_num_threads() == threads, "a kernel has changed torch's threads"
    finally:
        torch.set_num_threads(before)
    assert served >= 3, f"{op}/{kind}.py serves only {served} of its samples"


@pytest.mark.parametrize("op", kernels.names)
def test_samples_are_telling(op: str) -> None:
    """A sample whose answer is all one number would let a wrong kernel pass."""
    spec = importlib.import_module(f"longspool.kernels.{op}.spec")
    varied = 0
    for _, args, kw in spec.samples():
        result, after = run(op, "ref", args, kw)
        outs = list(tensors(result)) or list(tensors(after))
        varied += any(t.numel() > 1 and t.float().nan_to_num().std() > 0 for t in outs)
    assert varied >= 2
