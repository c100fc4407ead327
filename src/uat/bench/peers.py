"""Peers: other libraries' policies with equal width, depth and heads, given the same number of steps.

Each function returns a call, or one sentence that says why the peer cannot be measured. Embeddings that a peer would
need around its Transformer are left out, which favours the peer.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch

from uat.bench.timing import Call
from uat.spec import Discrete, Spec, Vector

Peer = Callable[[Spec, Any, int, int, torch.device], Call | str]
"""Builds a timed call from decision problem, backbone's config, batch, context and device; or says why it cannot."""

NO_WORDS = {"vocab_size": 1, "bos_token_id": None, "eos_token_id": None}
"""Settings of the transformers library for models that take vectors instead of tokens."""

MOST = 1024
"""Step limit for peers that store all attention weights: three tokens per step, squared, for each head."""


def load(name: str, extra: str = "") -> Any:
    """Import a module, or return a sentence that says why that failed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) and error.name else name
        hint = f": pip install {extra or name}"
        return f"{name} is not installed{hint}" if missing == name else f"{name} does not load ({error}){hint}"


def decision_transformer(spec: Spec, config: Any, batch: int, context: int, device: torch.device) -> Call | str:
    """transformers' DecisionTransformerModel: no cache, so a forward pass over three tokens for each step."""
    library = load("transformers", "'uat-transformer[bench]'")
    if isinstance(library, str):
        return library
    if not (isinstance(spec.obs, Vector) and isinstance(spec.action, Discrete)):
        return "it takes vectors and as many action outputs"
    width, actions = spec.obs.width, spec.action.count
    same = {"hidden_size": config.d_model, "n_layer": config.num_layers, "n_head": config.num_heads}
    sizes = {"state_dim": width, "act_dim": actions, "max_ep_len": context, "n_positions": 3 * context}
    model = library.DecisionTransformerModel(
        library.DecisionTransformerConfig(**same, **sizes, n_inner=config.d_ff, action_tanh=False, **NO_WORDS)
    )
    model = model.to(device).eval()
    inputs = {
        "states": torch.rand(batch, context, width, device=device),
        "actions": torch.rand(batch, context, actions, device=device),
        "rewards": torch.rand(batch, context, 1, device=device),
        "returns_to_go": torch.rand(batch, context, 1, device=device),
        "timesteps": torch.arange(context, device=device).expand(batch, -1),
        "attention_mask": torch.ones(batch, context, dtype=torch.long, device=device),
    }

    @torch.inference_mode()
    def run() -> None:
        model(**inputs)

    return Call(run)


def gpt2_cached(spec: Spec, config: Any, batch: int, context: int, device: torch.device) -> Call | str:
    """transformers' GPT2Model with past_key_values: one token for each step, as in this library."""
    library = load("transformers", "'uat-transformer[bench]'")
    if isinstance(library, str):
        return library
    same = {"n_embd": config.d_model, "n_layer": config.num_layers, "n_head": config.num_heads}
    model = library.GPT2Model(
        library.GPT2Config(**same, n_inner=config.d_ff, n_positions=context, activation_function="relu", **NO_WORDS)
    )
    model = model.to(device).eval()
    x_BTD = torch.rand(batch, context, config.d_model, device=device)
    with torch.inference_mode():
        cache = library.DynamicCache()
        model(inputs_embeds=x_BTD[:, :-1], past_key_values=cache, use_cache=True)

    @torch.inference_mode()
    def before() -> None:
        if (extra := cache.get_seq_length() - (context - 1)) > 0:
            cache.crop(-extra)

    @torch.inference_mode()
    def run() -> None:
        model(inputs_embeds=x_BTD[:, -1:], past_key_values=cache, use_cache=True)

    return Call(run, before)


def d3rlpy(spec: Spec, config: Any, batch: int, context: int, device: torch.device) -> Call | str:
    """d3rlpy's DiscreteDecisionTransformer in its stateful wrapper: observation and last reward in, action out.

    It has no cache, so a forward pass over three tokens for each step; its feed-forward layers are 4 x width.
    """
    if batch > 1:
        return "it supports one stream only"
    if context > MOST:
        return f"beyond {MOST} steps its attention weights take gigabytes"
    if not (isinstance(spec.obs, Vector) and isinstance(spec.action, Discrete)):
        return "it takes vectors and discrete actions"
    library = load("d3rlpy")
    if isinstance(library, str):
        return library
    encoder = library.models.VectorEncoderFactory([config.d_model], exclude_last_activation=True)
    same = {"num_layers": config.num_layers, "num_heads": config.num_heads, "encoder_factory": encoder}
    sizes = {"context_size": context, "max_timestep": context, "activation_type": "relu"}
    algorithm = library.algos.DiscreteDecisionTransformerConfig(**same, **sizes).create(
        device="cuda:0" if device.type == "cuda" else "cpu:0"
    )
    algorithm.create_impl((spec.obs.width,), spec.action.count)
    greedy = library.algos.GreedyTransformerActionSampler()
    stream = algorithm.as_stateful_wrapper(target_return=0.0, action_sampler=greedy)
    obs_O, none_A = torch.rand(spec.obs.width).numpy(), torch.zeros(spec.action.count).numpy()
    algorithm.predict = lambda inputs: none_A  # fill the context without computing anything
    for _ in range(context - 1):
        stream.predict(obs_O, 0.5)
    del algorithm.predict
    return Call(lambda: stream.predict(obs_O, 0.5))


PEERS: dict[str, tuple[str, Peer]] = {
    "decision-transformer": ("transformers", decision_transformer),
    "gpt2-cached": ("transformers", gpt2_cached),
    "d3rlpy": ("d3rlpy", d3rlpy),
}
"""Each peer by name: its library, and the function that builds it."""
