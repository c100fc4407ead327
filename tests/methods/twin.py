"""Slow twins of TENT and CoTTA: one stream, plain modules, full autograd, lists of detached keys and values."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from tests.builders import moments
from uat.episode import Batch, Step
from uat.methods.cotta import Cotta
from uat.methods.tent import Tent
from uat.methods.vanilla import Vanilla
from uat.nn.blocks import Block


class Network:
    """A Vanilla stepped by its own modules, without gradients into the past."""

    def __init__(self, vanilla: Vanilla) -> None:
        self.vanilla = copy.deepcopy(vanilla)
        self.past: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.vanilla.backbone.blocks]

    def token(self, obs_1: Tensor) -> Tensor:
        backbone = self.vanilla.backbone
        if backbone.config.positions != "learned":
            return backbone.encoder(obs_1)[0]
        return (backbone.encoder(obs_1) + backbone.positions[len(self.past[0])])[0]

    def features(self, token_D: Tensor, present: list[tuple[Tensor, Tensor]] | None = None) -> Tensor:
        """Return h (D,) of a token; `present` replaces the present key and value of each layer."""
        backbone, self.now = self.vanilla.backbone, []
        x, context = backbone.norm(token_D), backbone.config.context
        for layer, block in enumerate(backbone.blocks):
            assert isinstance(block, Block)
            q, k, v = (
                y.unflatten(-1, (block.attention.num_heads, -1))
                for y in block.attention.project(block.attention_norm(x))
            )
            if backbone.rotary is not None:
                rotation = backbone.rotary(torch.tensor(len(self.past[layer])), q.dtype)
                q, k = rotation.turn(q), rotation.turn(k)
            self.now.append((k, v))
            pairs = [*self.past[layer], (k, v) if present is None else present[layer]][-(context or 0) :]
            keys_SHE, values_SHE = (torch.stack(part) for part in zip(*pairs, strict=True))
            weight_SH = ((keys_SHE * q).sum(-1) / q.shape[-1] ** 0.5).softmax(0)
            x = x + block.attention.out((weight_SH[..., None] * values_SHE).sum(0).flatten())
            x = x + block.ff(block.ff_norm(x))
        return backbone.last_norm(x)

    def logits(self, h_D: Tensor, step: Step) -> Tensor:
        """Return the logits of allowed actions only."""
        logits_A = self.vanilla.head.linear(h_D)
        return logits_A if step.allowed is None else logits_A[step.allowed[0]]

    def move_on(self, now: list[tuple[Tensor, Tensor]]) -> None:
        for past, (k, v) in zip(self.past, now, strict=True):
            past.append((k.detach(), v.detach()))


def spread(logits: Tensor, step: Step, count: int) -> Tensor:
    """Return the logits of all actions, given those of the allowed ones."""
    if step.allowed is None:
        return logits
    return torch.full((count,), -torch.inf, dtype=logits.dtype).masked_scatter(step.allowed[0], logits)


def tent(policy: Tent, batch: Batch) -> Tensor:
    """Logits (T, A) of a batch of one episode."""
    network = Network(policy.learner)
    norms = [m for m in network.vanilla.backbone.modules() if isinstance(m, nn.LayerNorm)]
    adam = torch.optim.Adam([p for norm in norms for p in norm.parameters()], lr=policy.config.adaptation_rate)
    answers = []
    for step in moments(batch):
        logits = network.logits(network.features(network.token(step.obs)), step)
        answers.append(spread(logits.detach(), step, policy.spec.action.count))
        adam.zero_grad()
        torch.distributions.Categorical(logits=logits).entropy().backward()
        adam.step()
        network.move_on(network.now)
    return torch.stack(answers)


def cotta(policy: Cotta, batch: Batch) -> Tensor:
    """Logits (T, A) of a batch of one episode."""
    c, source = policy.config, policy.learner
    student, teacher = Network(source), Network(source)
    weights = {name: student.vanilla.backbone.get_parameter(name) for name in policy.layout.shapes}
    answers = []
    for t, step in enumerate(moments(batch)):
        count = torch.tensor([t])
        with torch.no_grad():
            token_D = teacher.token(step.obs)
            plain = teacher.logits(teacher.features(token_D), step)
            now, size = teacher.now, token_D.square().mean().sqrt()
            copies = [
                teacher.logits(teacher.features(token_D + n * size, now), step) for n in policy.jitter(count)[0, 1:]
            ]
            certain = plain.softmax(0).max() >= c.certainty
            target = (plain if certain else torch.stack(copies).mean(0)).softmax(0)
            teacher.move_on(now)
        answers.append(spread(plain, step, policy.spec.action.count))
        logits = student.logits(student.features(student.token(step.obs)), step)
        gradients = torch.autograd.grad(-(target * logits.log_softmax(0)).sum(), list(weights.values()))
        student.move_on(student.now)
        with torch.no_grad():
            for weight, gradient in zip(weights.values(), gradients, strict=True):
                weight -= c.adaptation_rate * gradient
            for name, weight in weights.items():
                slow = teacher.vanilla.backbone.get_parameter(name)
                slow.copy_(c.teacher_decay * slow + (1 - c.teacher_decay) * weight)
            restored = torch.zeros(sum(policy.layout.sizes), dtype=torch.bool)
            restored[policy.restored(count)[0]] = True
            for (name, weight), part in zip(weights.items(), restored.split(policy.layout.sizes), strict=True):
                back = part.unflatten(0, weight.shape[::-1])
                own = source.backbone.get_parameter(name)
                weight.copy_(torch.where(back.T if weight.dim() == 2 else back, own, weight))
    return torch.stack(answers)
