"""The process that steps a share of the environments: it reads requests from stdin and writes answers to stdout.

It is started as a program of its own, `python -m uat.adapters.worker`, so that a user's script is not run again, and it
ends when its stdin is closed, which happens when the process that started it ends, however that ends. Messages
are pickled and come from that process alone.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from typing import BinaryIO


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until there are no more."""
    sys.path[:] = pickle.load(requests)  # before anything of the user's is unpickled
    environments = None
    while True:
        try:
            what, *arguments = pickle.load(requests)
        except EOFError:
            break
        try:
            if what == "open":
                from uat.adapters.environments import LocalEnvironments
                from uat.adapters.sources import share_spec

                spec, parts = pickle.loads(arguments[0])
                share_spec(spec)
                environments = LocalEnvironments(*parts)
                answer = None
            else:
                answer = getattr(environments, what)(*arguments)
        except Exception as error:  # environments may raise anything; a ValueError holds the whole sentence
            answer = error if type(error) is ValueError else ValueError(f"{type(error).__name__}: {error}")
        pickle.dump(answer, answers, protocol=pickle.HIGHEST_PROTOCOL)
        answers.flush()
    if environments is not None:
        environments.close()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process by closing its stdin
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # an environment that prints must not disturb the answers
    try:
        serve(requests, answers)
    except BrokenPipeError:  # the parent has ended
        os._exit(1)


if __name__ == "__main__":
    main()
