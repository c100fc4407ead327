"""Every fast engine refuses a policy with changed modules and names them; harmless changes are accepted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from tests.builders import CPU, SPECS, build_random, largest, moments, random_batch, stream
from uat import Session
from uat.engines import FusedEngine, NumpyEngine, kernels, plan, plan_session
from uat.engines.fused import FusedPolicy, fused_view, unsupported_structure
from uat.engines.worlds import FusedRollouts
from uat.methods import METHODS as ALL_METHODS
from uat.methods.policy import TransformerPolicy
from uat.methods.uat import UAT, UATConfig
from uat.methods.vanilla import Vanilla
from uat.nn import structure
from uat.nn.encoders import VectorEncoder, ZeroMap
from uat.nn.heads import DiscreteHead, WeightsHead
from uat.spec import Spec

SPEC = SPECS["vector-discrete"]
METHODS = ("uat", "vanilla", "adt", "dt")
NOT_FUSED = {"uat-late", "uat-plus"}
"""Methods on the shared backbone that no kernel knows."""
FUSIBLE = [name for name, method in ALL_METHODS.items() if issubclass(method.policy, TransformerPolicy)]
BLOCK = "backbone.blocks.0"
Change = Callable[[Any], object]


class Row(NamedTuple):
    """A change of a policy, the expected error, and the methods that have the changed part."""

    change: Change
    said: str
    methods: tuple[str, ...] = METHODS


def put(path: str, module: object) -> Change:
    """Return a function that sets an attribute of a module, or replaces a module."""
    owner, _, name = path.rpartition(".")
    return lambda policy: setattr(policy.get_submodule(owner), name, module)


def inside(path: str, change: Change) -> Change:
    return lambda policy: change(policy.get_submodule(path))


class OtherNorm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class LayerNorm(nn.LayerNorm):
    """A subclass with the same name."""


class OtherHead(DiscreteHead):
    def logits(self, h: Tensor, allowed: Tensor | None = None) -> Tensor:
        return super().logits(h.tanh(), allowed)


class PaddedActions(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input + 1)


def zero(*args: Any, **named: Any) -> Tensor:
    return torch.zeros(1)


def pad_positions(policy: Any) -> None:
    policy.backbone.positions = nn.Parameter(torch.cat([policy.backbone.positions.detach()] * 2))


def turn_positions(policy: Any) -> None:
    policy.backbone.positions = nn.Parameter(policy.backbone.positions.detach().t().contiguous().t())


def share_layers(policy: Any) -> None:
    policy.backbone.blocks[1].ff[0].weight = policy.backbone.blocks[0].ff[0].weight


def lose_a_block(policy: Any) -> None:
    del policy.backbone.blocks[1]


def turn_the_network_around(policy: Any) -> None:
    modules = dict(policy.backbone.blocks[0].ff.named_children())
    policy.backbone.blocks[0].ff._modules = {name: modules[name] for name in ("0", "2", "1")}


def shadow_a_weight(policy: Any) -> None:
    object.__setattr__(policy.head.linear, "weight", torch.zeros(4, 12))


def set_config(policy: Any) -> None:
    policy.config = replace(policy.config, dropout=0.5)


FEEDBACK: tuple[str, ...] = ("uat",)
CHANGES: dict[str, Row] = {
    # what a module is
    "activation": Row(put(f"{BLOCK}.ff.1", nn.GELU()), f"{BLOCK}.ff.1 is of class GELU, expected ReLU"),
    "norm": Row(put(f"{BLOCK}.ff_norm", OtherNorm(12)), f"{BLOCK}.ff_norm is of class OtherNorm, expected LayerNorm"),
    "norm of the same name": Row(put("backbone.last_norm", LayerNorm(12)), "expected torch.nn.modules.normalization"),
    "class of a module": Row(inside(BLOCK, lambda m: setattr(m, "__class__", nn.Module)), "is of class Module"),
    "encoder": Row(
        lambda p: setattr(p.backbone, "encoder", nn.Sequential(p.backbone.encoder, nn.Tanh())),
        "backbone.encoder is of class Sequential, expected VectorEncoder",
    ),
    "head": Row(put("head", OtherHead(12, 4)), "head is of class OtherHead, expected DiscreteHead"),
    "kind of head": Row(put("head", WeightsHead(12, 4)), "head is of class WeightsHead"),
    "parametrization": Row(inside(f"{BLOCK}.ff.0", parametrizations.weight_norm), ".ff.0 is of class Parametrized"),
    "fewer blocks": Row(lose_a_block, "backbone.blocks has no module 1"),
    "one more block": Row(lambda p: p.backbone.blocks.append(p.backbone.blocks[0]), "has one more module, 2"),
    "order": Row(turn_the_network_around, f"{BLOCK}.ff has the modules 0, 2, 1, expected 0, 1, 2"),
    "no module": Row(put(f"{BLOCK}.drop", None), f"{BLOCK}.drop is None, expected Dropout"),
    # how it is set
    "eps": Row(put(f"{BLOCK}.attention_norm.eps", 1), f"{BLOCK}.attention_norm.eps is 1, expected 1e-05"),
    "eps of the last norm": Row(put("backbone.last_norm.eps", 0.5), "backbone.last_norm.eps is 0.5"),
    "dropout": Row(put(f"{BLOCK}.drop.p", 0.5), f"{BLOCK}.drop.p is 0.5, expected 0.0"),
    "dropout of attention": Row(put(f"{BLOCK}.attention.dropout", 0.5), f"{BLOCK}.attention.dropout is 0.5"),
    "number of heads": Row(put(f"{BLOCK}.attention.num_heads", 2), f"{BLOCK}.attention.num_heads is 2, expected 3"),
    "backbone's config": Row(
        lambda p: setattr(p.backbone, "config", replace(p.backbone.config, past_table="clamp")), "backbone.config is "
    ),
    "policy's config": Row(set_config, "backbone.config is "),
    "axes of the encoder": Row(put("backbone.encoder.num_axes", 2), "backbone.encoder.num_axes is 2, expected 1"),
    "a setting is gone": Row(
        inside(f"{BLOCK}.attention", lambda m: delattr(m, "dropout")), f"{BLOCK}.attention lacks dropout"
    ),
    # hooks and methods of its own
    "forward hook": Row(inside(BLOCK, lambda m: m.register_forward_hook(zero)), f"{BLOCK} has a forward hook"),
    "forward pre-hook": Row(
        inside(f"{BLOCK}.ff", lambda m: m.register_forward_pre_hook(zero)), f"{BLOCK}.ff has a forward pre-hook"
    ),
    "backward hook": Row(
        inside("head", lambda m: m.register_full_backward_hook(zero)), "head has a backward hook"
    ),
    "hook of the policy": Row(lambda p: p.register_forward_hook(zero), "the policy has a forward hook"),
    "pruning": Row(
        inside(f"{BLOCK}.ff.0", lambda m: prune.l1_unstructured(m, "weight", 3)), f"{BLOCK}.ff.0 has a forward pre-hook"
    ),
    "forward of its own": Row(put(f"{BLOCK}.ff.forward", zero), f"{BLOCK}.ff has its own forward"),
    "step of its own": Row(put(f"{BLOCK}.step", zero), f"{BLOCK} has its own step"),
    "policy's features": Row(put("features", zero), "the policy has its own features"),
    "policy's step": Row(put("step", zero), "the policy has its own step"),
    "a weight that is no parameter": Row(shadow_a_weight, "head.linear has its own weight"),
    # tensors
    "norm without scale": Row(
        put(f"{BLOCK}.ff_norm", nn.LayerNorm(12, elementwise_affine=False)), f"{BLOCK}.ff_norm.elementwise_affine is"
    ),
    "scale is gone": Row(put(f"{BLOCK}.ff_norm.weight", None), f"{BLOCK}.ff_norm.weight is None, expected Parameter"),
    "no bias": Row(put("head.linear", nn.Linear(12, 4, bias=False)), "head.linear.bias is None, expected Parameter"),
    "a parameter too many": Row(
        lambda p: p.head.register_parameter("scale", nn.Parameter(torch.ones(1))), "head has one more parameter, scale"
    ),
    "a buffer too many": Row(
        lambda p: p.head.register_buffer("mask", torch.ones(4)), "head has one more buffer, mask"
    ),
    "more positions": Row(pad_positions, "backbone.positions has the shape (16, 12), expected (8, 12)"),
    "positions of other strides": Row(turn_positions, "backbone.positions is not contiguous"),
    "shared weights": Row(share_layers, f"backbone.blocks.1.ff.0.weight is the same tensor as {BLOCK}.ff.0.weight"),
    "type of the head": Row(inside("head", nn.Module.double), "head.linear.weight is torch.float64 on cpu, expected"),
    "type of a norm": Row(
        inside("backbone.last_norm", lambda m: m.bfloat16()), "backbone.last_norm.weight is torch.bfloat16 on cpu"
    ),
    "device": Row(inside("head", lambda m: m.to("meta")), "head.linear.weight is torch.float32 on meta"),
    "wider network": Row(
        put(f"{BLOCK}.ff", nn.Sequential(nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 12))),
        f"{BLOCK}.ff is of class Sequential, expected FeedForward",
    ),
    # feedback
    "decay": Row(put("utility.feedback_decay", 0.1), "utility.feedback_decay is 0.1, expected 0.7", FEEDBACK),
    "rewards unseen": Row(put("utility.encoder.use_reward", False), "use_reward is False, expected True", FEEDBACK),
    "activation of utility": Row(put("utility.encoder.mlp.1", nn.Tanh()), "mlp.1 is of class Tanh", FEEDBACK),
    "bias of utility": Row(
        put("utility.encoder.mlp.0", nn.Linear(4, 8)), "mlp.0.bias is Parameter", FEEDBACK
    ),
    "no gates of queries": Row(put("utility.regime", ZeroMap(5, 12)), "utility.regime is of class ZeroMap", FEEDBACK),
    "padded actions": Row(
        put("utility.encoder.action", PaddedActions(5, 3, padding_idx=0)), "action is of class PaddedActions", FEEDBACK
    ),
    "fewer channels": Row(put(f"{BLOCK}.attention.project.modulated", "q"), "is 'q', expected 'qkv'", FEEDBACK),
    "no offsets": Row(
        inside(f"{BLOCK}.attention.project", lambda m: setattr(m, "bias_3HEE", None)),
        "bias_3HEE is None, expected Parameter",
        FEEDBACK,
    ),
    "actions of a token": Row(put("action", PaddedActions(5, 12, padding_idx=0)), "of class PaddedActions", ("adt",)),
    "bias of rewards": Row(put("reward", nn.Linear(1, 12)), "reward.bias is Parameter", ("adt",)),
    "scale of returns": Row(put("return_scale", 3.0), "return_scale is 3.0, expected", ("dt",)),
    "action tokens": Row(put("action", VectorEncoder(4, 12, bias=False)), "the policy lacks action", ("dt",)),
}  # fmt: skip

every_change = pytest.mark.parametrize(
    ("method", "name"), [(method, name) for name, row in CHANGES.items() for method in row.methods]
)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the GPU takes policies of any size."""
    monkeypatch.setattr(kernels, "unsupported_step", lambda *parts: None)
    monkeypatch.setattr(kernels, "unsupported_pass", lambda *parts: None)
    monkeypatch.setattr(kernels, "supports_rollout", lambda *parts: True)


def build(method: str, spec: Spec = SPEC, **settings: Any) -> TransformerPolicy:
    return cast(TransformerPolicy, build_random(method, spec, dtype=torch.float32, **settings))


def worlds(spec: Spec) -> Any:
    """A simulator whose world a policy's kernel can play."""

    class Worlds(FusedRollouts):
        def fused_world(self, noise: Any) -> Any:
            raise NotImplementedError

    made = Worlds()
    made.spec = spec
    return made


def refusals(policy: TransformerPolicy) -> list[str | None]:
    """Return each engine's reason to refuse the policy, or None."""
    engine = plan(policy)
    assert (engine.name == "plain") == (engine.refused is not None)
    assert engine.name == "plain" or isinstance(engine.learner, FusedPolicy)
    whole = isinstance(engine, FusedEngine) and engine.view.supports_fused_rollout(worlds(policy.spec))
    assert whole == (engine.name != "plain" and isinstance(policy, UAT | Vanilla))
    said = [engine.refused, engine.refused_pass]
    if type(policy) in (UAT, Vanilla):
        session = plan_session(policy, 1)
        assert session.name == ("NumPy step" if session.refused is None else "plain")
        said.append(session.refused)
    return said


@every_change
def test_every_engine_refuses_what_it_would_not_see(method: str, name: str) -> None:
    policy, row = build(method), CHANGES[name]
    assert not any(refusals(policy))
    view = fused_view(policy)
    row.change(policy)
    assert not view.supports_fused_rollout(worlds(policy.spec))
    said = refusals(policy)
    assert len(said) == (3 if method in ("uat", "vanilla") else 2)
    for sentence in said:
        assert sentence is not None
        assert row.said in sentence


# ---------------------------------------------------------------- answers


CHANGED = ("activation", "eps", "forward hook", "head", "decay")
"""Changes after which a policy still acts, with other results."""


@pytest.mark.parametrize("name", CHANGED)
def test_a_session_falls_back_and_agrees(name: str) -> None:
    def halve(module: nn.Module, given: Any, out: Tensor) -> Tensor:
        return out / 2

    policy, batch = build("uat"), random_batch(SPEC, whole=True)
    before = stream(policy, batch)
    change = inside("backbone.last_norm", lambda m: m.register_forward_hook(halve))
    (change if name == "forward hook" else CHANGES[name].change)(policy)
    with torch.no_grad():
        expected = policy.logits(batch)
    assert (expected - before).abs().max() > 1e-3
    session = Session(policy)
    assert session.path == "cached"
    with pytest.raises(ValueError, match="path='fast' is not possible: "):
        Session(policy, path="fast")
    torch.testing.assert_close(stream(policy, batch), expected, rtol=0, atol=1e-5 * largest(expected))


def note(policy: Any) -> None:
    policy.note = policy.head.note = "mine"


@torch.no_grad()
def move_weights(policy: Any) -> None:
    for parameter in policy.parameters():
        parameter.mul_(1.1)


HARMLESS: dict[str, Change] = {
    "weights": move_weights,
    "notes": note,
    "frozen weights": lambda p: p.requires_grad_(False),
    "double precision": lambda p: p.double(),
    "hooks of checkpoints": lambda p: p.head.register_state_dict_post_hook(zero),
    "a new head of the same kind": put("head", DiscreteHead(12, 4)),
    "training": lambda p: p.train(),
}


@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_what_changes_no_engine_is_taken(method: str, name: str) -> None:
    policy = build(method)
    HARMLESS[name](policy)
    assert not any(refusals(policy))
    if method in ("uat", "vanilla"):
        batch, fast = random_batch(SPEC, whole=True), plan_session(policy.eval(), 1)
        assert isinstance(fast, NumpyEngine)
        state, expected = fast.init_state(len(batch.valid), SPEC.steps, CPU), stream(policy, batch)
        found = torch.stack([fast.step(state, moment)[0] for moment in moments(batch)], 1)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * largest(expected))


def test_every_variant_and_every_problem_is_what_it_was_built_as() -> None:
    for spec in SPECS.values():
        for method in (name for name in FUSIBLE if not ALL_METHODS[name].policy.unsupported_reason(spec)):
            reason = unsupported_structure(build(method, spec, dropout=0.1))
            assert (reason is not None) == (method in NOT_FUSED), (method, reason)


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"binding": "late"}, "late gates"), *(({"tokens": kind}, repr(kind)) for kind in ("feedback", "two"))],
)
def test_gates_and_tokens_that_kernels_do_not_know_are_refused(settings: dict[str, Any], named: str) -> None:
    for refused in refusals(build("uat", **settings)):
        assert refused is not None
        assert named in refused


def test_a_subclass_and_hooks_of_all_modules_are_refused() -> None:
    class Mine(UAT):
        pass

    mine = Mine(SPEC, cast(UATConfig, build("uat").config))
    assert plan(mine).refused == "no fused step: Mine is a class of its own, and may compute anything"
    assert plan(mine).refused_pass == "no fused pass: Mine is a class of its own, and may compute anything"
    assert plan_session(mine, 1).refused == "Mine has no fast step"
    policy = build("uat")
    handle = nn.modules.module.register_module_forward_hook(lambda *given: None)
    try:
        assert plan(policy).refused == "no fused step: torch has a global forward hook"
        assert plan_session(policy, 1).refused == "torch has a global forward hook"
    finally:
        handle.remove()
    assert not any(refusals(policy))


def test_a_policy_that_cannot_be_built_again_is_refused() -> None:
    class Mine(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            raise RuntimeError("no weights\nhere")

    found = structure.difference(Mine.__new__(Mine), 3)
    assert found == "the policy cannot be built again to compare with (RuntimeError: no weights)"


def test_comparing_moves_no_random_numbers_and_a_config_changed_by_force_is_seen() -> None:
    policy, before = build("uat", d_ff=11), torch.get_rng_state()
    assert unsupported_structure(policy) is None
    assert torch.equal(torch.get_rng_state(), before)
    object.__setattr__(policy.config, "d_ff", 13)
    assert plan(policy).refused == f"no fused step: {BLOCK}.ff.0.out_features is 11, expected 13"
    assert plan(build("uat", d_ff=11)).refused is None


# ---------------------------------------------------------------- changed after a path was chosen


@pytest.mark.parametrize("method", METHODS)
def test_a_policy_changed_after_fusing_takes_the_plain_step(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, batch = build(method), random_batch(SPEC, whole=True)
    packed: list[object] = []
    monkeypatch.setattr(kernels, "pack", lambda *parts: packed.append(parts))
    view = fused_view(policy)
    view.init_state(2, 3, CPU)
    assert len(packed) == 1
    CHANGES["activation"].change(policy)
    found = stream(view, batch)
    assert len(packed) == 1
    assert torch.equal(found, stream(policy, batch))


@pytest.mark.parametrize("name", ["activation", "one module does not train"])
@pytest.mark.parametrize("method", METHODS)
def test_a_policy_changed_after_fusing_leaves_the_fused_pass(method: str, name: str) -> None:
    policy, batch = build(method).train(), random_batch(SPEC, whole=True)
    view = fused_view(policy, fused_pass=True)
    if name in CHANGES:
        CHANGES[name].change(policy)
    else:
        policy.backbone.blocks[0].eval()
    found = view.loss(batch)["imitation"][0]
    assert not view.execution.fused_pass
    assert torch.equal(found, policy.loss(batch)["imitation"][0])


# ---------------------------------------------------------------- methods that adapt


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (CHANGES["activation"].change, f"{BLOCK}.ff.1 is of class GELU, expected ReLU"),
        (inside(f"{BLOCK}.ff.0", lambda m: m.register_forward_hook(zero)), f"{BLOCK}.ff.0 has a forward hook"),
        (
            put("backbone", build_random("vanilla", SPEC).get_submodule("backbone")),
            "backbone or head is not the learner",
        ),
        (put("head", DiscreteHead(12, 4)), "backbone or head is not the learner"),
    ],
    ids=["activation", "hook", "backbone", "head"],
)
@pytest.mark.parametrize("method", ["tent", "cotta"])
def test_a_changed_policy_does_not_adapt(method: str, change: Change, said: str) -> None:
    """An adapting step reads weights directly too, and would ignore the change."""
    policy = build_random(method, SPEC, dtype=torch.float32)
    policy.init_state(2, 3, CPU)
    change(policy)
    with pytest.raises(ValueError, match=f"cannot adapt this policy: .*{said}"):
        policy.init_state(2, 3, CPU)
    with pytest.raises(ValueError, match="cannot adapt this policy"):
        Session(policy)
