"""Run in a process that will be killed: a command of `uat`, or the decisions of a session.

Every validation leaves a checkpoint here, where a real training leaves one every few seconds: so kills come between
checkpoints and in the middle of them. TensorBoard, which takes long to import, is not looked for.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path

EVERY = 7
"""Steps between two snapshots of a session."""
EPISODE = 20
"""Steps after which one stream of a session restarts."""


def prepare() -> None:
    from uat.training import checkpoint

    checkpoint.SAVE_SECONDS = 0.0
    sys.modules["tensorboard"] = None  # type: ignore[assignment]


def main(words: Sequence[str], log: str | None = None) -> None:
    """`uat ...` or `session FOLDER POLICY STREAMS STEPS`.

    log: the file that takes both outputs.
    """
    if log is not None:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(file, 1)
        os.dup2(file, 2)
    prepare()
    if words[0] == "session":
        decide(Path(words[1]), Path(words[2]), streams=int(words[3]), steps=int(words[4]))
        return
    from uat.cli import main as command

    sys.argv = [*words]
    command(words[1:])


def decide(folder: Path, policy: Path, *, streams: int, steps: int) -> None:
    """Play a session, starting from its last snapshot.

    The folder holds the policy that the session plays, its decisions (one line per step) and a snapshot: how many
    steps are done, and the pickled session.
    """
    import uat
    from uat.files import append_rows, write_atomically

    own, decisions, snapshot = folder / "policy.safetensors", folder / "decisions.jsonl", folder / "session.pickle"
    done, session = 0, None
    if snapshot.exists():
        done, session = pickle.loads(snapshot.read_bytes())  # our own file
    elif not own.exists():
        uat.save(own, uat.load(policy), "uat")
    if session is None:
        session = uat.Session(uat.load(own), streams=streams, capacity=EPISODE * (streams + 1))
    kept = decisions.read_text().splitlines(keepends=True)[:done] if decisions.exists() else []
    write_atomically(decisions, "".join(kept).encode())
    for step in range(done, steps):
        if step % EPISODE == 0:
            session.restart([step // EPISODE % streams])
        obs, reward = what_is_seen(step, streams, session)
        append_rows(decisions, [{"step": step, "chosen": session.act(obs, reward=reward).tolist()}])
        if (step + 1) % EVERY == 0 or step + 1 == steps:
            uat.save(own, uat.load(own), "uat")
            write_atomically(snapshot, pickle.dumps((step + 1, session)))


def what_is_seen(step: int, streams: int, session: object) -> tuple[object, object]:
    """Observations and rewards of a step, which depend only on the step."""
    import numpy as np

    draw = np.random.default_rng(step)
    spec = session.spec  # type: ignore[attr-defined]
    return draw.standard_normal((streams, spec.obs.width), dtype=np.float32), draw.standard_normal(streams)


if __name__ in ("__main__", "__mp_main__"):  # workers of a grid import the main module of their parent
    prepare()
if __name__ == "__main__":
    main(sys.argv[1:])
