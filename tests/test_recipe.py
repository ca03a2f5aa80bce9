"""Recipe text becomes methods and comes back; what is not understood is said in a sentence."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longspool.errors import PlanError
from longspool.method import registry
from longspool.methods.evict.snapkv import SnapKV
from longspool.methods.select.quest import Quest
from longspool.plan import Item
from longspool.recipe import parse


def test_reads_names_parameters_layers_and_wrappers() -> None:
    assert parse("") == parse("  ") == parse("dense") == ()
    assert parse("snapkv") == (Item(SnapKV()),)
    assert parse(" snapkv( budget = '30%', when=64 )+quest(per_head=True) ") == (
        Item(SnapKV(budget="30%", when=64)),
        Item(Quest(per_head=True)),
    )
    (item,) = parse("vericache(adakv(snapkv(budget=70), floor=0) + int4, horizon=3)")
    assert str(item) == "vericache(adakv(snapkv(budget=70), floor=0) + int4, horizon=3)"
    assert [type(m).__name__ for m in item.method.wrapped()] == ["AdaKV", "Int4"]


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("@ 2-", 2, None),
        ("@2-5", 2, 5),
        ("@ -5", 0, 5),
        ("@ 3", 3, 3),
        ("@ 2 - 5", 2, 5),
        ("@ '2-5'", 2, 5),
        ("", 0, None),
        ("@ 0-", 0, None),
    ],
)
def test_reads_layers(text: str, first: int, last: int | None) -> None:
    one, other = parse(f"quest {text} + int8")
    assert (one.first, one.last) == (first, last) and other.everywhere
    assert parse(str(one)) == (one,)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("snapvk", "no method 'snapvk'; did you mean 'snapkv'?"),
        ("completely_unknown_thing", f"lists all {len(registry())}"),
        ("snapkv(bugdet=3)", "no parameter 'bugdet'; its parameters are: budget, when, window, kernel"),
        ("flashsampling(x=1)", "its parameters are: none"),
        ("snapkv(budget=)", "not of the form"),
        ("snapkv + ", "not of the form"),
        ("snapkv int4", "not of the form"),
        ("(" * 500, "not of the form"),
        ("snapkv + 3", "no method: '3'"),
        ("snapkv - int4", "no method"),
        ("snapkv.int4", "no method"),
        ("[snapkv]", "no method"),
        ("snapkv(budget=other)", "budget must be"),
        ("snapkv(budget=__import__('os'))", "budget must be"),
        ("snapkv(budget={[]: 1})", "budget must be"),
        ("snapkv(budget=1, budget=2)", "budget twice"),
        ("snapkv(**{'budget': 1})", "no parameter '**'"),
        ("snapkv(int4)", "snapkv wraps no other method"),
        ("snapkv(100)", "no method: '100'"),
        ("adakv", "adakv wraps exactly one method"),
        ("adakv(snapkv + snapkv)", "got 2"),
        ("vericache(inner=3)", "no parameter 'inner'"),
        ("quest @ 'a-b'", "must be a number or a range"),
        ("quest @ int4", "no method"),
        ("quest @ 1 @ 2", "no method"),
        ("int4(window='wide')", "window='wide' must be a whole number"),
        ("int4(window=1.5)", "window=1.5 must be a whole number"),
        ("int4(window=True)", "window=True must be a whole number"),
        ("int4(window=None)", "window=None must be a whole number"),
        ("quest(per_head=1)", "per_head=1 must be True or False"),
        ("snapkv(budget=[1])", "budget=(1,) must be a whole number or text"),
        ("adakv(snapkv, floor='low')", "floor='low' must be a number"),
        ("trianglemix(dense='all')", "dense='all' must be a whole number or None"),
    ],
)
def test_mistakes_are_sentences(text: str, said: str) -> None:
    with pytest.raises(PlanError) as error:
        parse(text)
    assert said in str(error.value)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [*"()+@,=-'[]{}*.: ", "snapkv", "int4", "adakv", "vericache", "quest", "budget", "window", "12", "0", "True", "None", "-"]
        ),
        max_size=14,
    ).map("".join)
    | st.text(max_size=12)
)
def test_any_text_is_a_recipe_or_a_sentence(text: str) -> None:
    try:
        items = parse(text)
    except PlanError as error:
        assert len(str(error)) > 20
    else:
        assert parse(" + ".join(map(str, items))) == items


def test_a_long_recipe_is_read_or_refused() -> None:
    assert len(parse("+".join(["int4"] * 200))) == 200
    try:
        parse("+".join(["int4"] * 100_000))
    except PlanError as error:
        assert "form" in str(error)[-200:]
