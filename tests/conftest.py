"""One thread per process, and property tests that ask the same questions on every machine."""

import torch

torch.set_num_threads(1)
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
