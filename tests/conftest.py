"""One thread per process, Triton interpreted where there is no GPU, and property tests that ask the same everywhere."""

import os

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported, whichever test does that
try:
    from hypothesis import HealthCheck, settings
except ImportError:  # tests of a GPU alone need no hypothesis
    pass
else:
    settings.register_profile(
        "uat",
        derandomize=True,
        deadline=None,
        database=None,
        max_examples=10,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    settings.load_profile("uat")
