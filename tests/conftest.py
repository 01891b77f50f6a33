"What all tests share"
import os
import shutil
import signal

import pytest

# the tests are many and their models tiny: threads would only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")

# a shell that starts this in the background has Ctrl-C ignored, and Python then leaves it so
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# before anything that imports Triton (parts of transformers do): without a GPU kernels are interpreted
import minivllm.kernels.common  # noqa: E402, F401


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "A tiny model whose byte tokenizer has a chat template; one for each file, which may write to it"
    from byte_tokenizer import CHAT_TEMPLATE, byte_tokenizer, model_folder
    return model_folder(tmp_path_factory.mktemp("chat") / "model", byte_tokenizer(chat_template=CHAT_TEMPLATE))


@pytest.fixture(scope="session")
def smollm2_folder():
    "The demo model's folder, fetched on first use"
    from minivllm.demo import demo_model
    return demo_model(progress=False)


@pytest.fixture
def checkpoint(tmp_path):
    "A copy of a tiny checkpoint that a test may damage, and a function that rewrites its tensors"
    from rigs import tiny_model
    from safetensors.torch import load_file, save_file

    def copy(name="qwen3"):
        folder = tmp_path / name
        shutil.copytree(tiny_model(name)[0], folder)

        def rewrite(change):
            tensors = load_file(folder / "model.safetensors")
            change(tensors)
            save_file(tensors, folder / "model.safetensors")
        return folder, rewrite
    return copy
