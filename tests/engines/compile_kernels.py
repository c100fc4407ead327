"""Compiles every Triton kernel that a training of the methods named would launch, for a GPU that need not be here,
and those of the worlds.

    python -m tests.engines.compile_kernels 90 tf32 uat dt
    python -m tests.engines.compile_kernels 90 fp32 uat method.d_model=32 method.num_heads=2 _step _play

Words with "=" are settings; those that start with "_" are the only kernels to compile; "gates-outside" has gates made
by torch, in float32, as where there are many actions; "three" has three policies share the device.
Prints one JSON line per kernel: name, registers per thread, bytes spilled, shared memory.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from uat.config import override
from uat.engines.fused import fused_view
from uat.engines.triton import block as triton_block
from uat.engines.triton import gates as triton_gates
from uat.engines.triton.adam import fused_adam
from uat.engines.triton.darkroom import FusedDarkRoom
from uat.engines.triton.sepsis import FusedSepsis
from uat.episode import Batch, Step
from uat.methods.policy import TransformerPolicy
from uat.recipes import recipe
from uat.training.optimizing import build_optimizer
from uat.training.trainer import build_policy

POINTERS = {torch.float32: "*fp32", torch.float16: "*fp16", torch.int64: "*i64", torch.int32: "*i32", torch.bool: "*i1"}
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
EPISODES = 256
FLAGS = ("gates-outside", "three")
EVEN = [["tt.divisibility", 16]]


class Compiler:
    """Stands in for a launch: nothing runs, everything is compiled once."""

    def __init__(self, architecture: int, only: list[str]) -> None:
        self.architecture, self.only, self.seen = architecture, only, set[Any]()

    def launch(self, kernel: Any, *args: Any, **given: Any) -> None:
        if self.only and kernel.fn.__name__ not in self.only:
            return
        options = {name: given.pop(name) for name in ("num_warps", "num_stages") if name in given}
        values = dict(zip((p.name for p in kernel.params), args, strict=False)) | given
        signature: dict[str, Any] = {}
        constants: dict[tuple[int, ...], Any] = {}
        even: dict[tuple[int, ...], Any] = {}
        for index, parameter in enumerate(kernel.params):
            value = values[parameter.name]
            kind = "constexpr" if parameter.is_constexpr else self.type_of(value, plain=parameter.do_not_specialize)
            signature[parameter.name] = kind
            if kind == "constexpr":
                constants[(index,)] = value
            elif isinstance(value, tuple):
                constants |= {(index, at): value[at] for at, part in enumerate(kind) if part == "constexpr"}
                even |= {(index, at): EVEN for at, part in enumerate(value) if isinstance(part, torch.Tensor)}
            elif isinstance(value, torch.Tensor) or value % 16 == 0:
                even[(index,)] = EVEN
        key = (kernel.fn.__name__, tuple(signature.items()), tuple(constants.items()), tuple(options.items()))
        if key in self.seen:
            return
        self.seen.add(key)
        target = GPUTarget("cuda", self.architecture, 32)
        compiled = triton.compile(ASTSource(kernel, signature, constants, even), target=target, options=options)
        print(json.dumps({"kernel": kernel.fn.__name__, "shared": compiled.metadata.shared, **self.usage(compiled)}))

    def type_of(self, value: Any, *, plain: bool) -> Any:
        """As a launch would have it: also a 1 is a constant, unless it is asked to be `plain`."""
        if isinstance(value, tuple):
            return tuple(self.type_of(part, plain=plain) for part in value)
        if isinstance(value, torch.Tensor):
            return POINTERS[value.dtype]
        if value is None or (value == 1 and isinstance(value, int) and not plain):
            return "constexpr"
        return "i32" if isinstance(value, int) else "fp32"

    def usage(self, compiled: Any) -> dict[str, int]:
        suffix = "a" if self.architecture >= 90 else ""
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(compiled.asm["ptx"])
            file.flush()
            command = [PTXAS, "-v", f"-arch=sm_{self.architecture}{suffix}", file.name, "-o", "/dev/null"]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        registers, spilled = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill stores", said)
        assert registers is not None
        assert spilled is not None
        return {"registers": int(registers[1]), "spilled": int(spilled[1])}


def main(architecture: str, precision: str, *given: str) -> None:
    changes = {name: int(value) for name, _, value in (word.partition("=") for word in given if "=" in word)}
    methods = [word for word in given if "=" not in word and not word.startswith("_") and word not in FLAGS]
    if "gates-outside" in given:
        triton_gates.MOST_ACTIONS = 0
    compiler = Compiler(int(architecture), [word for word in given if word.startswith("_")])
    JITFunction.run = lambda self, *args, grid, warmup, **given: compiler.launch(self, *args, **given)  # pyright: ignore[reportAttributeAccessIssue]
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    triton_block.large_products = lambda device: architecture == "90"
    for method in methods:
        config = override(recipe("darkroom", method), {"train.precision": "fp32", **changes})
        domain = config.build_domain()
        policy = build_policy(config, domain, torch.device("cpu")).train()
        assert isinstance(policy, TransformerPolicy)
        view = fused_view(policy, fused_pass=True, concurrent_policies=3 if "three" in given else 1)
        shape = (EPISODES, domain.spec.horizon)
        batch = Batch(
            obs=torch.zeros(*shape, 10),
            prev_action=torch.zeros(shape, dtype=torch.long),
            prev_reward=torch.zeros(shape),
            target=torch.zeros(shape, dtype=torch.long),
            valid=torch.ones(shape, dtype=torch.bool),
        )
        view.loss(batch)["imitation"][0].backward()
        for p in policy.parameters():
            p.grad = torch.zeros_like(p)
        fused_adam(build_optimizer(policy, config.train), config.train.clip)
        told = {name: getattr(batch, name)[:, 0] for name in ("obs", "prev_action", "prev_reward")}
        state = view.init_state(EPISODES, domain.spec.horizon, "cpu")
        view.decide(state, Step(**told, first=batch.valid[:, 0]), torch.zeros(EPISODES, 5))
        simulator: Any = FusedDarkRoom(domain.simulator("train", "cpu"))
        if view.supports_fused_rollout(simulator):
            noise = simulator.noise(torch.arange(EPISODES), 0)
            view.fused_rollout(simulator, noise, torch.zeros(EPISODES, domain.spec.horizon, 5))
    for domain, fused in (("darkroom", FusedDarkRoom), ("sepsis", FusedSepsis)):
        simulator = fused(recipe(domain, "uat").build_domain().simulator("train", "cpu"))
        world, _ = simulator.reset(simulator.noise(torch.arange(EPISODES), 0))
        simulator.step(world, torch.zeros(EPISODES, dtype=torch.long))


if __name__ == "__main__":
    main(*sys.argv[1:])
