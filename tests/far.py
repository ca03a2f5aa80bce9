"""A make-believe second device, "far:0": its tensors are CPU tensors in a wrapper that refuses to be mixed with those of the CPU.

As a program (`python tests/far.py ops`, `python tests/far.py engine RECIPE ...`) it runs every op's reference, or the tiny models under
recipes, on that device and compares with the CPU. What torch would refuse on CUDA is refused here, without a GPU.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("far")
FAR = torch.device("far", 0)
aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default}
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
"""A tensor of any device may be indexed by tensors of the CPU."""


class Far(Tensor):
    """A tensor that says it is on "far:0"."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Far:
        form = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype, "device": FAR}
        far = Tensor._make_wrapper_subclass(cls, inner.shape, **form)  # type: ignore[attr-defined]
        far.inner = inner
        return far

    def new_tensor(self, data: object, dtype: torch.dtype | None = None) -> Far:
        return Far(torch.tensor(data, dtype=dtype or self.dtype))

    def tolist(self) -> Any:
        return self.inner.tolist()

    def numpy(self, *args: object, **kw: object) -> Any:
        raise TypeError("can't convert far:0 device type tensor to numpy")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: object, args: tuple = (), kw: dict | None = None) -> Any:
        return compute(func, args, kw or {})


class Reach(TorchDispatchMode):
    """While it is on, tensors can be made on "far:0" and sent there."""

    def __torch_dispatch__(self, func: Any, types: object, args: tuple = (), kw: dict | None = None) -> Any:
        return compute(func, args, kw or {})


def compute(func: Any, args: tuple, kw: dict) -> Any:
    """Run an op of torch on the inner tensors; its results are where the op's arguments, or its `device`, say."""
    tensors, goal = [x for x in tree_leaves((args, kw)) if isinstance(x, Tensor)], kw.get("device")
    far = {id(x.inner): x for x in tensors if isinstance(x, Far)}
    if not far and (goal is None or torch.device(goal).type != "far"):
        return func(*args, **kw)
    near = any(x.dim() and not isinstance(x, Far) for x in tensors)
    lead = isinstance(args[0], Far) if args else False
    if func in INDEXED:
        values = args[2] if len(args) > 2 else args[0]
        refused = bool(far) and (not lead or (isinstance(values, Tensor) and values.dim() and not isinstance(values, Far)))
    else:
        refused = bool(far) and near and func not in COPIES
    if refused:
        raise RuntimeError(f"{func} got tensors of two devices")
    there = lead if func in INDEXED | COPIES else bool(far)
    if goal is not None:
        there, kw = torch.device(goal).type == "far", kw | {"device": torch.device("cpu")}
    args, kw = tree_map_only(Far, lambda x: x.inner, (args, kw))
    out = func(*args, **kw)
    if not there or func is aten._local_scalar_dense.default:
        return out
    return tree_map_only(Tensor, lambda t: far[id(t)] if id(t) in far else Far(t), out)


def ops() -> None:
    """Every op's reference: first with all its tensors far, then with those that name rows and bounds near, as the memory has them."""
    from longspool import kernels
    from toolbox import send

    for op in kernels.names:
        spec, ref = importlib.import_module(f"longspool.kernels.{op}.spec"), kernels.implementation(op, "ref")
        for name, args, kw in spec.samples():
            with Reach():
                sent, more = send((args, kw), FAR)
            mixed = tuple(a if names_rows(a) else b for a, b in zip(args, sent, strict=True))
            want = ref.run(*args, **kw)
            for given in (sent, mixed) if any(map(names_rows, args)) else (sent,):
                with Reach():
                    got = ref.run(*given, **more)
                for a, b in zip(outs(got, given), outs(want, args), strict=True):
                    assert isinstance(a, Far), f"{op} {name}: a result is on the CPU"
                    torch.testing.assert_close(a.inner, b, equal_nan=True)


def names_rows(value: object) -> bool:
    """Whether an argument is a page table, a length, a bound or an index."""
    return isinstance(value, Tensor) and not value.is_floating_point() and value.dim() < 3


def outs(result: object, args: tuple) -> list[Tensor]:
    """The tensors of a result, or of an op that works in place."""
    return [x for x in tree_leaves(args[:2] if result is None else result) if isinstance(x, Tensor)]


def engine(recipes: list[str]) -> None:
    """Under each recipe, written `kind:recipe`, a tiny model's logits over prompts in chunks and decode steps, and a drawn answer."""
    from longspool.model import tiny as making
    from longspool.model.weights import Noise
    from toolbox import KINDS, Fitting, Rig, model

    class FarNoise(Noise):
        def matrix(self, name: str, rows: int, cols: int) -> Tensor:
            return super().matrix(name, rows, cols).to(FAR)

        def vector(self, name: str, size: int) -> Tensor:
            return super().vector(name, size).to(FAR)

    for recipe in recipes:
        kind, _, text = recipe.partition(":")
        near = model(kind)  # before it would be made, and remembered, on the far device
        with Reach():
            making.Noise = FarNoise  # type: ignore[misc]
            far = Rig(making.tiny(kind, **KINDS[kind]), fits=Fitting(near, FAR))
            making.Noise = Noise  # type: ignore[misc]
            got, answer = serve(far, text)
            far.pools.check()
        want, expected = serve(Rig(near), text)
        assert isinstance(got, Far)
        torch.testing.assert_close(got.inner, want, atol=1e-4, rtol=1e-4, msg=lambda m, r=recipe: f"{r}: {m}")
        assert answer == expected and len(set(answer)) > 2, f"{recipe}: {answer}, not {expected}"


def serve(rig: Any, recipe: str) -> tuple[Tensor, list[int]]:
    """Logits of the longer of two texts that share their steps, all but its last four tokens in chunks; and six tokens drawn."""
    from longspool.recipe import parse
    from toolbox import Job, small, tokens, words

    plan = rig.plan([small(item.method) for item in parse(recipe)] if recipe else "")
    (logits, _), *_ = rig.together([Job(plan, words(count, 1), count - 4, 64) for count in (150, 40)])
    return logits, tokens(rig.answer(plan, words(100), max_tokens=6, temperature=0.8, seed=3))


def mixing() -> None:
    """What torch refuses between the CPU and a GPU is refused here, or nothing below would prove anything."""
    with Reach():
        far, near = torch.ones(3, device=FAR), torch.ones(3)
        for mix in (lambda: far + near, lambda: torch.cat([far, near]), lambda: near[far.long()], far.numpy):
            try:
                mix()
            except (RuntimeError, TypeError):
                continue
            raise AssertionError("tensors of two devices were mixed")
        assert torch.equal((far[near.long() - 1] + 1).cpu(), near + near)


if __name__ == "__main__":
    os.environ["LONGSPOOL_KERNELS"] = "ref"
    sys.path[:0] = [str(Path(__file__).parent / "model")]
    torch.set_num_threads(1)
    with torch.no_grad():
        mixing()
        ops() if sys.argv[1] == "ops" else engine(sys.argv[2:])
