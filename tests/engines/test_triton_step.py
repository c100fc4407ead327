"""The fused step against its slow twin: on a GPU where there is one, by Triton's interpreter elsewhere."""

# ruff: noqa: E402 (what needs Triton is imported where there is Triton)
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
pytest.importorskip("triton")

import triton
import triton.language as tl

from tests.builders import crossed, interpreted, random_batch, randomise
from uat.bench.steps import plain
from uat.distributions import choose
from uat.engines import kernels, plan
from uat.engines.fused import PackedCache, fused_view, utility_of
from uat.engines.triton import step as triton_step
from uat.engines.triton.complete_weights import room
from uat.engines.triton.parts import normed_at_once
from uat.engines.triton.step import MOST_PASTS, ROWS, WIDEST, served, unsupported_reason
from uat.episode import Step
from uat.methods import METHODS
from uat.methods.policy import TransformerPolicy
from uat.nn.cache import KVCache
from uat.spec import Assets, Discrete, Items, Spec, Vector, Weights

DEVICE = "cuda" if CUDA else "cpu"
SPEC = Spec(obs=Vector(5), action=Discrete(4), horizon=1000)
SMALL = {"d_model": 32, "num_heads": 2, "num_layers": 2, "d_ff": 64, "dropout": 0.0}
FULL = {"d_model": 64, "num_heads": 4, "num_layers": 3, "d_ff": 128, "dropout": 0.0}
POISON = 1e18
LONG = 70 if CUDA else 20
"""More steps than are read at a time."""
FUSED = [
    name for name, m in METHODS.items() if issubclass(m.policy, TransformerPolicy)
]  # every method on the shared backbone


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow: there a past of twenty steps is long."""
    if not CUDA:
        monkeypatch.setattr(triton_step, "CHUNK", 16)


def build(method: str, spec: Spec = SPEC, **sizes: int | float) -> TransformerPolicy:
    policy = METHODS[method].build(spec, METHODS[method].configure(**{**SMALL, **sizes}))
    assert isinstance(policy, TransformerPolicy)
    return randomise(policy, 1).float().to(DEVICE).eval()


def cache_of(state: Any) -> KVCache:
    return getattr(state, "cache", state)


def open_fused(policy: TransformerPolicy, streams: int, steps: int) -> Any:
    """A memory for the fused step, whose unused slots hold nonsense."""
    state = fused_view(policy).init_state(streams, steps, DEVICE)
    kv = cache_of(state).kv_L2BHSE
    kv.fill_(min(POISON, torch.finfo(kv.dtype).max))
    return state


def both(
    policy: TransformerPolicy, slow: Any, fast: Any, step: Step, gumbel_BA: Tensor | None = None, policies: int = 1
) -> Any:
    """Logits and state of the slow step, then of the fused one with what it chose."""
    view = fused_view(policy, concurrent_policies=policies)
    with torch.no_grad():
        expected, slow = policy.step(slow, step)
        kept = tuple(x.clone() for x in tensors(fast))
        choice, _ = view.decide(fast, step, gumbel_BA)
        for x, value in zip(tensors(fast), kept, strict=True):
            x.copy_(value)
        found, fast = view.step(fast, step)
    return expected, slow, found, fast, choice


def tensors(state: Any) -> list[Tensor]:
    """What a step changes in a memory."""
    cache = cache_of(state)
    others = [x for x in (getattr(state, name, None) for name in ("ubar_BU", "return_B")) if x is not None]
    return [cache.kv_L2BHSE, cache.length_B, *others]


def worst_difference(policy: TransformerPolicy, streams: int, steps: int, policies: int = 1) -> float:
    """The largest difference between the two, relative to the largest logit, over steps with restarts on the way."""
    slow: Any = policy.init_state(streams, steps, DEVICE)
    fast = open_fused(policy, streams, steps)
    generator, worst = torch.Generator().manual_seed(0), 0.0

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    for t in range(steps):
        first = torch.ones(streams, dtype=torch.bool) if t == 0 else torch.rand(streams, generator=generator) < 0.05
        action = torch.randint(-1, 4, (streams,), generator=generator)
        known = {"prev_action": action.to(DEVICE), "prev_reward": random(streams), "first": first.to(DEVICE)}
        step = Step(obs=random(streams, 5), **known)
        gumbel_BA = -torch.log(-torch.log(torch.rand(streams, 4, generator=generator))).to(DEVICE)
        expected, slow, found, fast, choice = both(policy, slow, fast, step, gumbel_BA, policies)
        assert torch.equal(choice, choose(found, SPEC, gumbel_BA))
        worst = max(worst, ((found - expected).abs().max() / expected.abs().max()).item())
    return worst


@pytest.mark.parametrize(
    ("method", "streams", "steps"),
    [
        *((m, 1, 2) for m in FUSED),
        ("uat", 3, 3),
        *(interpreted(m, *size) for m in ("uat", "vanilla") for size in [(1, LONG), (3, 4)]),
        *(interpreted(m, 3, 3) for m in FUSED if m != "uat"),
    ],
)
def test_fused_step_equals_the_slow_one(method: str, streams: int, steps: int) -> None:
    assert worst_difference(build(method), streams, steps) < 1e-5


@contextlib.contextmanager
def tf32_allowed() -> Iterator[None]:
    """As trainings under tf32 have it: products inside the layers in half precision."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize(
    ("method", "streams", "steps"),
    [("uat", 1, 1), *(interpreted(m, 2, 3) for m in ("uat", "vanilla", "uat-no-q", "dt"))],
)
def test_where_tf32_is_allowed_the_layers_are_rounded_to_half_precision(method: str, streams: int, steps: int) -> None:
    """As far off as rounding to eleven bits makes it, not exact; keys and values are kept rounded."""
    policy = build(method)
    with tf32_allowed():
        assert cache_of(open_fused(policy, 1, 1)).kv_L2BHSE.dtype == torch.float16
        assert 1e-6 < worst_difference(policy, streams, steps) < 5e-3


def test_a_memory_filled_by_the_fused_step_can_be_made_plain_for_the_slow_one() -> None:
    """As the bench does, so that each path reads a memory of its own kind."""
    policy = build("uat")
    with tf32_allowed():
        cache = cache_of(plain(open_fused(policy, 1, 1)))
    assert (cache.kv_L2BHSE.dtype, type(cache)) == (torch.float32, KVCache)


@pytest.mark.parametrize("method", ["tent", "cotta"])
def test_what_adapts_while_acting_opens_plain_memories_beside_a_fused_learner(method: str) -> None:
    policy: Any = METHODS[method].build(SPEC, METHODS[method].configure(**SMALL)).to(DEVICE)
    learner = fused_view(policy.learner)
    with tf32_allowed():
        assert isinstance(learner.init_state(1, 1, DEVICE), PackedCache)
        cache = policy.init_state(1, 1, DEVICE).cache
    assert (cache.kv_L2BHSE.dtype, type(cache)) == (torch.float32, KVCache)


@pytest.mark.kernels
@pytest.mark.parametrize(("streams", "steps"), [(2, LONG - 3), (19, 2)])
def test_the_same_for_a_long_past_and_for_several_streams_in_a_program(streams: int, steps: int) -> None:
    with tf32_allowed():
        assert worst_difference(build("uat"), streams, steps, policies=44) < 5e-3


def test_numbers_too_large_for_half_precision_are_the_largest_there_and_nan_stays_nan() -> None:
    policy, most = build("vanilla"), torch.finfo(torch.float16).max
    first, second = (cast(Any, block) for block in policy.backbone.blocks)
    still = {"prev_action": torch.zeros(2, dtype=torch.long), "prev_reward": torch.zeros(2)}
    obs = torch.tensor([[0.0] * 5, [torch.nan] * 5])
    step = Step(obs=obs, **still, first=torch.ones(2, dtype=torch.bool)).to(DEVICE)
    found = []
    for value in (most, 1e6):
        with torch.no_grad():
            first.ff[0].weight[0], first.ff[0].bias[0] = 0.0, value  # a hidden unit
            first.ff[2].weight[:, 0] = 1e-4
            second.attention.out.weight[0, 0] = value
        with tf32_allowed(), torch.no_grad():
            state = open_fused(policy, 2, 2)
            found.append(fused_view(policy).step(state, step)[0])
    assert found[0][0].isfinite().all()
    assert torch.equal(found[0][0], found[1][0])
    assert found[1][1].isnan().all()


@pytest.mark.parametrize(
    ("method", "width", "size"),
    [
        *((*case, (1, 1)) for case in (("uat", 20), ("uat-linear", 4))),
        *(interpreted(*case, (3, 3)) for case in (("uat", 1), ("uat", 20), ("uat", 130), ("uat-linear", 4))),
    ],
)
def test_utilities_of_any_width_are_filled_up(method: str, width: int, size: tuple[int, int]) -> None:
    policy = build(method, d_utility=width, d_hidden=24)
    assert unsupported_reason(policy.backbone, utility_of(policy)) is None
    assert worst_difference(policy, *size) < 1e-5


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("policies", [2, 3, 44])
def test_a_policy_beside_others_multiplies_in_the_shapes_that_it_has_alone(heads: int, policies: int) -> None:
    for streams in (1, 19, 63, 132, 256, 257, 1024, 4096):
        alone, among = served(streams, heads, 1), served(streams, heads, policies)
        assert alone <= among <= ROWS
        assert room(alone * heads) == room(among * heads), (streams, alone, among)
        assert (alone <= MOST_PASTS) == (among <= MOST_PASTS), (streams, alone, among)
    assert [served(n, 4, 1) for n in (1, 256, 1024, 4096)] == [1, 2, 4, 8]
    assert [served(n, 4, 3) for n in (1, 256, 1024, 4096)] == [1, 4, 4, 8]


@pytest.mark.kernels
@pytest.mark.parametrize("method", ["uat", "vanilla"])
def test_a_program_serves_several_streams_where_many_policies_share_the_device(method: str) -> None:
    """Of 44 policies each has six programs, so that 19 streams go four to a program, and three to the last."""
    policy = build(method)
    assert served(19, policy.backbone.config.num_heads, 44) == 4
    assert worst_difference(policy, 19, 2, policies=44) < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device: the interpreter's arg-max finds an action anyway")
def test_an_action_is_chosen_also_where_logits_are_no_numbers() -> None:
    policy = build("vanilla")
    with torch.no_grad():
        policy.head.linear.bias.fill_(torch.nan)
    state = open_fused(policy, 3, 2)
    still = {"prev_action": torch.zeros(3, dtype=torch.long), "prev_reward": torch.zeros(3)}
    step = Step(obs=torch.zeros(3, 5), **still, first=torch.ones(3, dtype=torch.bool)).to(DEVICE)
    choice, _ = fused_view(policy).decide(state, step)
    assert ((choice >= 0) & (choice < 4)).all()


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("method", "streams", "steps"),
    [
        *((m, *size) for m in ("uat", "vanilla") for size in [(1, 1000), (63, 200), (256, 60), (257, 61), (4096, 5)]),
        *((m, 256, 60) for m in FUSED),
    ],
)
def test_fused_step_equals_the_slow_one_at_full_size(method: str, streams: int, steps: int) -> None:
    assert worst_difference(build(method, **FULL), streams, steps) < 1e-5


@pytest.mark.parametrize(("capability", "hip"), [((7, 5), None), ((9, 0), "6.4")])
def test_gpus_without_the_instructions_that_kernels_name_are_refused(
    capability: tuple[int, int], hip: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    elsewhere: Any = SimpleNamespace(
        config=build("vanilla").config, positions=SimpleNamespace(device=torch.device("cuda"))
    )
    assert "NVIDIA GPU of compute capability 8.0" in (kernels.unsupported_step(elsewhere, None) or "")


@pytest.mark.parametrize(
    ("method", "tf32", "room", "refused"),
    [
        ("uat", False, 99, "up to 136 KB of shared memory, and this device has 99; precision tf32 needs less"),
        ("uat", False, 163, None),
        ("uat", True, 99, None),
        ("vanilla", False, 99, None),
    ],
)
def test_gpus_with_too_little_shared_memory_are_refused(
    method: str, tf32: bool, room: int, refused: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as most of those for workstations, under fp32: a launch there would fail."""
    policy = build(method, **FULL)
    monkeypatch.setattr(kernels, "compiles", lambda device: True)
    monkeypatch.setattr(kernels, "shared_memory", lambda device: room * 1024)
    monkeypatch.setattr(triton_step, "rounding", lambda: "half" if tf32 else "tf32x3")
    place = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
    elsewhere: Any = SimpleNamespace(config=policy.backbone.config, positions=place)
    found = kernels.unsupported_step(elsewhere, utility_of(policy))
    assert found is None if refused is None else refused in (found or "")


@pytest.mark.parametrize(
    ("method", "streams", "steps"),
    [("uat", 1, 3), ("uat", 3, 3), ("uat", 7, 3), ("vanilla", 7, 3), ("vanilla", 2, 18)],
)
@pytest.mark.kernels
def test_the_same_in_half_precision_to_its_eleven_bits(method: str, streams: int, steps: int) -> None:
    """There weights and the past are asked for before they are needed, a past of eighteen steps chunk by chunk."""
    with tf32_allowed():  # so many policies that a program serves one, two or four streams
        assert worst_difference(build(method), streams, steps, policies=132) < 1e-2


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("method", ["uat", "vanilla"])
def test_the_same_under_tf32_to_its_eleven_bits(method: str) -> None:
    with tf32_allowed():
        assert worst_difference(build(method, **FULL), 257, 61) < 1e-2


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("streams", [256, 1024])
@pytest.mark.parametrize("method", ["uat", "vanilla"])
def test_a_policy_beside_others_gives_the_bits_that_it_gives_alone(method: str, streams: int) -> None:
    policy, steps = build(method, **FULL), 20
    generator, told = torch.Generator().manual_seed(0), []
    for t in range(steps):
        first = torch.ones(streams, dtype=torch.bool) if t == 0 else torch.rand(streams, generator=generator) < 0.05
        known = {"prev_action": torch.randint(-1, 4, (streams,), generator=generator), "first": first}
        known["prev_reward"] = torch.randn(streams, generator=generator)
        told.append(Step(obs=torch.randn(streams, 5, generator=generator), **known).to(DEVICE))
    found = []
    for policies in (1, 3):
        view = fused_view(policy, concurrent_policies=policies)
        with tf32_allowed(), torch.no_grad():
            state = open_fused(policy, streams, steps)
            logits = torch.stack([view.step(state, step)[0] for step in told])
        found.append((logits, cache_of(state).kv_L2BHSE))
    for alone, among in zip(*found, strict=True):
        assert torch.equal(alone, among)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [({"d_model": 48}, "d_model is 48"), ({"d_ff": 96}, "d_ff is 96"), ({"d_model": 8}, "d_model is 8")],
)
def test_sizes_that_do_not_fit_are_named(sizes: dict[str, int], reason: str) -> None:
    assert reason in (unsupported_reason(build("vanilla", SPEC, **sizes).backbone, None) or "")


def test_utilities_that_are_too_wide_are_named() -> None:
    policy = build("uat", d_utility=300)
    assert "to 256, and d_utility is 300" in (unsupported_reason(policy.backbone, utility_of(policy)) or "")


def test_wide_gates_take_the_slow_step_and_wide_blocks_without_them_do_not() -> None:
    many = build("uat", d_utility=256, d_hidden=256)
    assert "as 32,768, and they are 65,536" in (unsupported_reason(many.backbone, utility_of(many)) or "")
    assert unsupported_reason((few := build("uat", d_utility=256, d_hidden=128)).backbone, utility_of(few)) is None
    wide = build("uat", d_model=128, num_heads=4)
    assert "d_model of at most 64, and it is 128" in (unsupported_reason(wide.backbone, utility_of(wide)) or "")
    assert unsupported_reason(wide.backbone, None) is None
    wider = build("vanilla", d_model=256, num_heads=4)
    assert "from 16 to 128, and d_model is 256" in (unsupported_reason(wider.backbone, None) or "")


def test_doubles_take_the_slow_step() -> None:
    double = build("uat").double()
    assert "float64" in (unsupported_reason(double.backbone, utility_of(double)) or "")


SPECS = [
    Spec(obs=Items(7), action=Discrete(3), horizon=4),
    Spec(obs=Assets(3, 2), action=Weights(3), horizon=4),
    Spec(obs=Vector(200), action=Discrete(150), horizon=4),
]


@pytest.mark.parametrize(
    ("spec", "method", "masked"),
    crossed(
        pytest.mark.kernels,
        dict(zip(("items", "assets", "wide"), SPECS, strict=True)),
        ("uat", "uat-no-action"),
        (True, False),
    ),
)
def test_every_kind_of_observation_and_action(spec: Spec, method: str, masked: bool) -> None:
    policy = build(method, spec)
    slow: Any = policy.init_state(3, 4, DEVICE)
    fast = open_fused(policy, 3, 4)
    batch = random_batch(spec, whole=True).to(DEVICE)
    for t in range(2):
        allowed = torch.ones(3, spec.action.count, dtype=torch.bool, device=DEVICE)
        allowed[:, 1] = False
        told = {name: getattr(batch, name)[:, t] for name in ("obs", "prev_action", "prev_reward")}
        told = {name: x.float() if x.is_floating_point() else x for name, x in told.items()}
        first = torch.full((3,), t == 0, device=DEVICE)
        step = Step(**told, first=first, allowed=allowed if masked else None)
        expected, slow, found, fast, choice = both(policy, slow, fast, step)
        assert torch.equal(found.isinf(), expected.isinf())
        seen = expected.isfinite()
        assert (found - expected)[seen].abs().max() < 1e-5 * expected[seen].abs().max()
        assert torch.equal(choice, choose(found, spec))
    assert SPECS[-1].action.count > WIDEST  # the last has its head outside


@pytest.mark.skipif(CUDA, reason="shows what happens without CUDA")
def test_a_policy_on_a_cpu_says_why_it_is_not_fused() -> None:
    policy = build("uat")
    engine = plan(policy)
    assert (engine.name, engine.refused) == ("plain", "the fused step needs CUDA")
    assert engine.refused_pass == "the fused pass needs CUDA"


@triton.jit
def _norms(x_ptr, gamma_ptr, beta_ptr, out_ptr, ROWS: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr):
    n, d = tl.arange(0, ROWS), tl.arange(0, D)
    here = n[:, None] * D + d[None, :]
    y = normed_at_once(tl.load(x_ptr + here), tl.load(gamma_ptr + d), tl.load(beta_ptr + d), D, PRECISION)
    tl.store(out_ptr + here, y)


@pytest.mark.parametrize(("mean", "half", "exact"), [(0, 1e-6, 1e-6), (10, 5e-5, 5e-6), (100, 5e-3, 5e-5)])
def test_norms_in_one_pass_lose_little_where_means_are_not_far_from_zero(
    mean: float, half: float, exact: float
) -> None:
    """Products of half precision round by up to 0.05 %. Where they are not used, norms take two passes."""
    torch.manual_seed(0)
    x, gamma, beta = torch.randn(16, 64) + mean, torch.randn(64), torch.randn(64)
    expected = torch.nn.functional.layer_norm(x.double(), (64,), gamma.double(), beta.double()).float()
    for precision, most in (("half", half), ("tf32x3", exact)):
        out = torch.empty(16, 64, device=DEVICE)
        given = (tensor.to(DEVICE) for tensor in (x, gamma, beta))
        cast(Any, _norms)[(1,)](*given, out, ROWS=16, D=64, PRECISION=precision)
        assert (out.cpu() - expected).abs().max() < most * expected.abs().max()


def test_rows_of_all_but_equal_numbers_have_a_norm() -> None:
    """Their spread is next to nothing, and rounding must not make it less than that."""
    torch.manual_seed(0)
    x, ones = (1234.567 + 1e-3 * torch.randn(16, 64)).to(DEVICE), torch.ones(64, device=DEVICE)
    out = torch.empty(16, 64, device=DEVICE)
    cast(Any, _norms)[(1,)](x, ones, ones, out, ROWS=16, D=64, PRECISION="half")
    assert out.isfinite().all()
