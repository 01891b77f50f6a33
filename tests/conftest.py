"What all tests share"
import os
import signal

import pytest

# the tests are many and their models tiny: threads would only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")

# a shell that starts this in the background has Ctrl-C ignored, and Python then leaves it so
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# before anything that imports Triton (parts of transformers do): without a GPU kernels are interpreted
import minivllm.kernels.common  # noqa: E402, F401


@pytest.fixture(scope="session")
def smollm2_folder():
    "The demo model's folder, fetched on first use"
    from minivllm.demo import demo_model
    return demo_model(progress=False)
