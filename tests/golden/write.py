"""Write the golden curves again: `python -m tests.golden.write`, or with the names of some methods."""

from __future__ import annotations

import sys

import torch

from tests.golden.curves import TRAINED, curve, file_of

if __name__ == "__main__":
    torch.set_num_threads(1)
    for method in sys.argv[1:] or TRAINED:
        file_of(method).write_text("".join(f"{loss!r}\n" for loss in curve(method)))
        print(f"wrote {file_of(method).name}")
