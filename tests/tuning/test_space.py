"""Spaces of a sweep: what can be written, what is refused, and the defaults."""

from __future__ import annotations

from typing import Any

import pytest

from tests.training.small_runs import tiny
from uat.config import override
from uat.recipes import recipe
from uat.tuning.space import Choice, Range, default_space, parse_space

UAT = tiny()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train.lr=1e-4..3e-3:log", Range(1e-4, 3e-3, log=True)),
        ("train.lr = 0..0.1", None),
        ("train.weight-decay=0..0.1", Range(0.0, 0.1)),
        ("method.num_layers=1..4", Range(1, 4, step=1)),
        ("method.d_ff=8..64:8", Range(8, 64, step=8)),
        ("method.d_ff=8..64:log", Range(8, 64, log=True, step=1)),
        ("method.d_model=8,16", Choice((8, 16))),
        ("method.context=none,2", Choice((None, 2))),
        ("method.context=1..3", Range(1, 3, step=1)),
        ("method.use-action=true,false", Choice((True, False))),
        ("method.positions=learned,none", Choice(("learned", "none"))),
        ("train.lr_schedule=constant,cosine", Choice(("constant", "cosine"))),
        ("method.decay=0.5,0.9", Choice((0.5, 0.9))),
        ("method.d_model=16", Choice((16,))),
    ],
)
def test_texts_are_read_by_the_type_of_their_setting(text: str, expected: Any) -> None:
    if expected is None:
        with pytest.raises(ValueError, match=r"train\.lr=0\.0 must be positive"):
            parse_space(UAT, [text])
        return
    [(name, values)] = parse_space(UAT, [text]).items()
    assert values == expected
    assert [type(value) for value in values.values] == [type(value) for value in expected.values]
    assert parse_space(UAT, {name: str(values)}) == {name: expected}


def test_python_may_list_values() -> None:
    assert parse_space(UAT, {"method.context": [None, 2]}) == {"method.context": Choice((None, 2))}


@pytest.mark.parametrize(
    ("space", "said"),
    [
        ("train.lrr=1..2", "unknown setting 'train.lrr'; did you mean 'train.lr'?"),
        ("lr", "'lr' must be NAME=VALUES"),
        ("train.lr=3..1", "train.lr='3..1': the range must begin below its end"),
        ("train.lr=1..1", "the range must begin below its end"),
        ("train.weight_decay=0..0.1:log", "a logarithmic range must begin above 0"),
        ("train.lr=1e-4..1e-3:lin", "a range may end in :log, not in :lin"),
        ("method.num_layers=1..4:0", "a range may end in :log, or by a step of whole numbers, not in :0"),
        ("method.d_ff=8..60:8", "the step 8 must divide 60 - 8 = 52"),
        ("train.lr=1e-4..", "train.lr='' must be a number"),
        ("train.lr=", "train.lr: a value is empty"),
        ("train.lr=1e-3,", "train.lr: a value is empty"),
        ("train.lr=fast", "train.lr='fast' must be a number"),
        ("train.lr=none", "train.lr='none' must be a number"),
        ("train.lr=nan..1", "train.lr=nan must be positive"),
        ("train.lr=-1,1", "train.lr=-1.0 must be positive"),
        ("method.num_layers=1.5", "method.num_layers='1.5' must be a whole number"),
        ("method.use_action=yes", "method.use_action='yes' must be true or false"),
        ("method.positions=a..b", "this setting is not a number; list its values"),
        ("method.positions=rotarry", "must be one of 'learned', 'rotary', 'none'"),
        ("method.d_model=8,8", "lists 8 twice"),
        ("method.d_model=8,9", "method.d_model=8,9: the value 9 is refused: num_heads=2 must divide d_model=9"),
        ("method.d_model=7..8", "the value 7 is refused"),
        ("domain.shift_steps=1,2", "this setting holds several values"),
        ("domain=1", "unknown setting 'domain'"),
        ("method_name=uat,vanilla", "unknown setting 'method_name'"),
        ("seed=0,1", "a sweep compares settings under one seed"),
    ],
)
def test_a_bad_space_gets_a_sentence(space: str, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_space(UAT, [space])
    assert said in str(caught.value)


@pytest.mark.parametrize("space", [{}, [], "train.lr=1,2", 3, {"train.lr": 3}, {"train.lr": []}, {3: "1"}, [3]])
def test_a_space_of_another_type_is_refused(space: Any) -> None:
    with pytest.raises(ValueError, match="space"):
        parse_space(UAT, space)


def test_a_setting_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"space train\.lr is given twice"):
        parse_space(UAT, ["train.lr=1..2", "train.lr=1..3"])


def test_values_may_be_valid_only_together() -> None:
    """6 features fit neither 2 heads times an even width nor the smoke recipe, but 3 heads."""
    space = ["method.d_model=9,8", "method.num_heads=3,4"]
    assert list(parse_space(UAT, space)) == ["method.d_model", "method.num_heads"]
    both = override(UAT, {"method.d_model": 9, "method.num_heads": 3})
    assert (both.method.d_model, both.method.num_heads) == (9, 3)
    with pytest.raises(ValueError, match="the value 7 is refused"):
        parse_space(UAT, ["method.d_model=7,8", "method.num_heads=3,4"])


# ---------------------------------------------------------------- defaults


def test_the_default_space_has_rates_width_and_context() -> None:
    assert default_space(recipe("darkroom", "uat", "quick")) == {
        "train.lr": Range(2e-4, 6e-3, log=True),
        "train.utility_lr": Range(2e-3, 6e-2, log=True),
        "method.d_model": Choice((32, 64, 128)),
        "method.context": Choice((None, 15)),
    }


def test_methods_without_a_setting_do_not_vary_it() -> None:
    assert "train.utility_lr" not in default_space(recipe("darkroom", "vanilla", "quick"))
    assert next(iter(default_space(recipe("markets", "sarl", "smoke")))) == "train.lr"


def test_ppo_varies_its_entropy_bonus_too() -> None:
    assert "objective.entropy" in default_space(recipe("darkroom", "uat", "smoke", objective="ppo"))


def test_what_the_user_has_chosen_does_not_vary() -> None:
    config = override(recipe("darkroom", "uat", "smoke"), {"train.lr": 1e-3, "method.context": 3})
    assert list(default_space(config)) == ["train.utility_lr", "method.d_model"]
