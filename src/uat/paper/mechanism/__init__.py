"""Analyses of trained policies: attention under shifts, gates by regime, accuracy around shifts."""

from uat.evaluation.gates import GateNorms, gate_norms
from uat.paper.mechanism.attention import (
    AttentionStudy,
    attention_maps,
    attention_under_shifts,
    centred,
    logit_split,
    post_shift_mass,
    shifted_episodes,
)
from uat.paper.mechanism.gates import gates_by_regime, gates_of
from uat.paper.mechanism.kinetics import kinetics_of, kinetics_rows
from uat.paper.mechanism.markets import MarketGates, gates_of_markets
from uat.paper.mechanism.terms import term_sizes, terms_of_runs

__all__ = [
    "AttentionStudy",
    "GateNorms",
    "MarketGates",
    "attention_maps",
    "attention_under_shifts",
    "centred",
    "gate_norms",
    "gates_by_regime",
    "gates_of",
    "gates_of_markets",
    "kinetics_of",
    "kinetics_rows",
    "logit_split",
    "post_shift_mass",
    "shifted_episodes",
    "term_sizes",
    "terms_of_runs",
]
