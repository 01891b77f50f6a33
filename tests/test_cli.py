"The command line: three commands, errors of one line, a conversation that survives mistakes and Ctrl-C"
import builtins
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from byte_tokenizer import CHAT_TEMPLATE, byte_tokenizer, model_folder
from rigs import DEVICE

import minivllm.__main__
from minivllm import LLM, SamplingParams
from minivllm.bench import load_result
from minivllm.cli import DEMO_PROMPTS, build_parser, compare_runs, field_comments, main, sampling_params, workload_lines
from minivllm.config import EngineConfig
from minivllm.engine.model_runner import ModelRunner
from minivllm.workloads import MEASURED

ROOT = Path(__file__).parents[1]
QUESTIONS = ["What is this?", "Why?"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("cli") / "model", byte_tokenizer(chat_template=CHAT_TEMPLATE))


@pytest.fixture
def options(folder):
    return ["--model", str(folder), "--num-kv-blocks", "64", "--max-tokens", "6", "--dtype", "float32"]


@pytest.fixture(scope="session")
def expected(folder):
    "What the library answers, greedily, to a conversation"
    def answer(*contents, max_tokens=6):
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
        with LLM(str(folder), num_kv_blocks=64, dtype="float32") as llm:
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
            return llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text
    return answer


@pytest.fixture
def type_in(monkeypatch):
    "Let `input` return these lines, then end; an exception among them is raised"
    def type_lines(*lines):
        queue = list(lines)

        def read(prompt=""):
            print(prompt, end="")
            if not queue: raise EOFError
            line = queue.pop(0)
            if isinstance(line, BaseException): raise line
            return line

        monkeypatch.setattr(builtins, "input", read)
    return type_lines


# generate


def test_generate(options, expected, capsys):
    assert main(["generate", *QUESTIONS, *options]) == 0
    out = capsys.readouterr().out
    for question in QUESTIONS: assert f"> {question}\n{expected(question).strip()}\n" in out
    assert "2 requests in" in out and "prompt tokens/s" in out and "output tokens/s" in out and "peak memory" in out


def test_generate_without_prompts_asks_the_demo_questions(options, capsys):
    assert main(["generate", *options]) == 0
    out = capsys.readouterr().out
    assert all(f"> {question}\n" in out for question in DEMO_PROMPTS) and "8 requests" in out


def test_raw_continues_the_text(options, folder, capsys):
    assert main(["generate", "Once", "--raw", *options]) == 0
    with LLM(str(folder), num_kv_blocks=64, dtype="float32") as llm:
        text = llm.generate("Once", SamplingParams(temperature=0.0, max_tokens=6), use_tqdm=False)[0].outputs[0].text
    assert f"> Once\n{text.strip()}\n" in capsys.readouterr().out


def test_a_model_without_a_chat_template_continues_the_text(tmp_path, options, capsys):
    assert main(["generate", "Once", *options, "--model", str(model_folder(tmp_path / "m"))]) == 0
    assert "> Once\n" in capsys.readouterr().out


def test_the_sampling_options_arrive(options, capsys):
    outs = []
    for more in ([], ["--temperature", "1"], ["--temperature", "1", "--seed", "1"], ["--temperature", "1", "--request-seed", "5"],
                 ["--temperature", "1", "--request-seed", "5", "--seed", "1"]):
        assert main(["generate", "Once", *options, *more]) == 0
        outs.append(capsys.readouterr().out.rsplit("\n1 requests", 1)[0])
    greedy, sampled, other, seeded, same = outs
    assert len({greedy, sampled, other, seeded}) == 4 and seeded == same


# mistakes


@pytest.mark.parametrize("arguments, message", [
    (["--max-num-seqs", "0"], "max_num_seqs=0"),
    (["--temperature", "-1"], "temperature=-1"),
    (["--max-model-len", "1000"], "max_model_len=1000"),
    (["--scheduling-policy", "fair"], "scheduling_policy='fair'"),
    (["--model", "/no/such/folder"], "neither a local folder nor a Hub id"),
    (["--model", str(ROOT)], "no config.json"),
    (["x" * 300], "prompt 0"),
    ([""], "prompt 0: the prompt is empty"),
])
def test_a_mistake_is_one_line_and_exit_code_2(options, capsys, arguments, message):
    raw = ["--raw"] if "" in arguments else []
    assert main(["generate", *options, *arguments, *raw]) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line and not line.startswith("\r")]
    assert lines[-1].startswith("minivllm: ") and message in lines[-1] and "Traceback" not in captured.err
    assert sum(line.startswith("minivllm: ") for line in lines) == 1


@pytest.mark.parametrize("arguments", [[], ["dance"], ["generate", "--tempature", "0"], ["generate", "--seed", "x"],
                                       ["bench", "--repeat", "0"], ["bench", "--num-prompts", "-1"], ["bench", "--compare", "x"]])
def test_what_the_parser_refuses(arguments, capsys):
    with pytest.raises(SystemExit) as exit: main(arguments)
    assert exit.value.code == 2 and "minivllm" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_mistake_is_found_before_the_model_is_loaded(command, capsys):
    assert main([command, "--model", "/no/such/folder", "--temperature", "-1"]) == 2
    assert "minivllm: temperature=-1" in capsys.readouterr().err


def test_answers_that_would_end_early_are_not_compared(options, capsys):
    assert main(["bench", *options, "--max-tokens", "1000", "--repeat", "1", "--num-prompts", "1"]) == 2
    assert "max_tokens=1000: makes sequences of" in capsys.readouterr().err


def test_a_bug_is_not_dressed_up_as_a_mistake(options, monkeypatch):
    monkeypatch.setattr(ModelRunner, "launch", lambda *args: None + 1)
    with pytest.raises(TypeError): main(["generate", "a", *options])


def test_ctrl_c_ends_generate(options, monkeypatch):
    def interrupted(*args): raise KeyboardInterrupt
    monkeypatch.setattr(ModelRunner, "launch", interrupted)
    assert main(["generate", "a", *options]) == 130


def test_ctrl_c_while_pytorch_is_imported(monkeypatch):
    real = builtins.__import__

    def interrupted(name, *args, **kwargs):
        if name == "minivllm.cli": raise KeyboardInterrupt
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", interrupted)
    assert minivllm.__main__.main() == 130


@pytest.mark.parametrize("command", ["generate", "chat", "bench"])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as exit: main([command, "--help"])
    out = capsys.readouterr().out
    assert exit.value.code == 0 and "--max-num-seqs" in out and "--model" in out and "--max-tokens" in out
    assert "requests that run at the same time (default: 256)" in " ".join(out.split())


def test_options_and_library_have_the_same_fields():
    args = vars(build_parser().parse_args(["generate"]))
    names = set(EngineConfig.__dataclass_fields__) - {"skip_tokenizer_init"}
    assert names <= args.keys()
    defaults = {name: field.default for name, field in EngineConfig.__dataclass_fields__.items() if name in names}
    assert {name: args[name] for name in names} == {**defaults, "model": "smollm2-135m"}
    assert set(field_comments(EngineConfig)) >= {"model", "max_model_len", "max_num_seqs", "load_format"}


def test_sampling_options_and_library_have_the_same_fields():
    parse = lambda *words: sampling_params(build_parser().parse_args(["generate", *words]))
    assert parse() == SamplingParams(temperature=0.0, max_tokens=64)
    words = "--repetition-penalty 1.5 --presence-penalty -1 --min-tokens 3 --stop END --include-stop-str-in-output --top-k 5"
    expected = dict(repetition_penalty=1.5, presence_penalty=-1, min_tokens=3, stop="END", include_stop_str_in_output=True, top_k=5)
    assert parse(*words.split()) == SamplingParams(temperature=0.0, max_tokens=64, **expected)
    args, missing = vars(build_parser().parse_args(["generate"])), {"n", "logprobs", "stop_token_ids"}
    assert set(SamplingParams.__dataclass_fields__) - args.keys() == missing
    assert set(field_comments(SamplingParams)) == set(SamplingParams.__dataclass_fields__)


# chat


def test_a_conversation(options, expected, type_in, capsys):
    first = expected(QUESTIONS[0])
    second = expected(QUESTIONS[0], first, QUESTIONS[1])
    type_in(*QUESTIONS)
    assert main(["chat", *options, "--temperature", "0"]) == 0
    assert capsys.readouterr().out.endswith(f"> {first}\n> {second}\n> ")


def test_an_empty_line_ends_the_chat(options, type_in, capsys):
    type_in("", "never asked")
    assert main(["chat", *options]) == 0
    assert capsys.readouterr().out.endswith("\n> ")


def test_a_system_message(options, type_in, capsys, monkeypatch):
    seen, stream = [], LLM.stream
    monkeypatch.setattr(LLM, "stream", lambda self, prompt, params: seen.append(prompt["prompt"]) or stream(self, prompt, params))
    type_in("Hi")
    assert main(["chat", *options, "--system", "Be brief."]) == 0
    assert seen[0].startswith("<bos>system:Be brief.<eot><bos>user:Hi<eot>")


def test_ctrl_c_ends_an_answer_and_not_the_chat(options, expected, type_in, capsys, monkeypatch):
    run, calls = ModelRunner.launch, []

    def interrupted(self, *args):
        if hasattr(self, "num_kv_blocks"): calls.append(args)  # a GPU's warm-up runs before there are any
        if len(calls) == 4: raise KeyboardInterrupt
        return run(self, *args)

    monkeypatch.setattr(ModelRunner, "launch", interrupted)
    type_in(*QUESTIONS)
    assert main(["chat", *options, "--temperature", "0"]) == 0
    out = capsys.readouterr().out
    answers = out.split("> ")[1:]
    part = answers[0].removesuffix(" ...\n")
    assert expected(QUESTIONS[0]).startswith(part) and answers[0].endswith(" ...\n") and part
    # the conversation goes on from what could be read
    assert answers[1] == expected(QUESTIONS[0], part, QUESTIONS[1]) + "\n"


def test_ctrl_c_at_the_prompt_ends_the_chat(options, type_in):
    type_in(KeyboardInterrupt())
    assert main(["chat", *options]) == 130


def test_a_question_that_does_not_fit_is_left_out(options, expected, type_in, capsys):
    type_in("x" * 300, QUESTIONS[0])
    assert main(["chat", *options, "--temperature", "0"]) == 0
    captured = capsys.readouterr()
    assert "minivllm: prompt 0: the prompt has" in captured.err
    assert captured.out.endswith(f"> > {expected(QUESTIONS[0])}\n> ")


def test_a_model_that_cannot_chat_says_so_at_once(tmp_path, options, type_in, capsys):
    type_in()
    assert main(["chat", *options, "--model", str(model_folder(tmp_path / "m"))]) == 2
    assert "minivllm: chat needs" in capsys.readouterr().err


def test_chat_from_a_pipe(options, expected):
    "As a program of its own, without a terminal"
    result = subprocess.run(
        [sys.executable, "-m", "minivllm", "chat", *options, "--temperature", "0"], cwd=ROOT, input=f"{QUESTIONS[0]}\n",
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONIOENCODING": "utf-8"})
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith(f"> {expected(QUESTIONS[0])}\n> ") and "minivllm:" not in result.stderr


def test_version(capsys):
    with pytest.raises(SystemExit) as exit: main(["--version"])
    assert exit.value.code == 0 and capsys.readouterr().out == f"minivllm {minivllm.__version__}\n"


# bench


def test_bench(options, tmp_path, capsys):
    file = tmp_path / "bench.json"
    assert main(["bench", *options, "--num-prompts", "3", "--repeat", "2", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    row, = result["rows"]
    assert row["name"] == "minivllm" and row["ratio"] == 1 and row["num_output_tokens"] == 18 and len(row["all_seconds"]) == 2
    assert row["output_tokens_per_second"] == pytest.approx(18 / row["seconds"])
    assert (result["num_prompts"], result["max_tokens"], result["dtype"]) == (3, 6, "torch.float32") and "cpu" in result["machine"]
    assert "output tokens/s" in capsys.readouterr().out


def test_bench_beside_transformers(options, tmp_path, capsys):
    "All three do the same work: as many tokens as asked for, end tokens among them, and in float32 the same ones"
    file = tmp_path / "bench.json"
    tokenizer = byte_tokenizer(chat_template=CHAT_TEMPLATE)
    folder = model_folder(tmp_path / "m", tokenizer, {"eos_token_id": list(range(130))}, eos_token_id=3)
    assert main(["bench", *options, "--model", str(folder), "--num-prompts", "4", "--max-tokens", "40",
                 "--repeat", "1", "--compare", "transformers", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["name"] for row in rows] == ["minivllm", "transformers, batched", "transformers, one by one"]
    assert all(row["num_output_tokens"] == 160 for row in rows)
    assert all(row["same_answers"] >= 3 for row in rows)
    assert capsys.readouterr().out.count("answers equal") == 3


def test_bench_computes_every_prompt_again(options, monkeypatch):
    "What an earlier run left in the prefix cache would make the later ones faster than they are"
    computed, step = [], minivllm.LLMEngine.step

    def counting(self):
        before = self.stats.num_prompt_tokens
        outputs = step(self)
        computed.append(self.stats.num_prompt_tokens - before)
        return outputs

    monkeypatch.setattr(minivllm.LLMEngine, "step", counting)
    assert main(["bench", *options, "--num-prompts", "1", "--repeat", "2"]) == 0
    assert len({n for n in computed if n}) == 1 and sum(n > 0 for n in computed) == 3


def test_what_a_comparison_says():
    "Round by round: the warm-up doesn't count, a slow round slows both, and equal answers are counted"
    def pretend(seconds, tokens):
        seconds = iter(seconds)
        return lambda: (next(seconds), tokens)

    first, second = compare_runs({"first": pretend([90, 1, 10, 1], [[1, 2], [3]]), "second": pretend([5, 2, 30, 3], [[1, 2], [4]])}, 3)
    assert (first["seconds"], first["ratio"], first["same_answers"], first["all_seconds"]) == (1, 1, 2, [1, 10, 1])
    assert (second["seconds"], second["ratio"], second["same_answers"], second["num_output_tokens"]) == (3, 3, 1, 3)
    assert second["output_tokens_per_second"] == 1


# bench, on workloads


TINY = ["--model", "tiny", "--device", "cpu", "--num-kv-blocks", "512", "--repeat", "1"]


def test_bench_of_workloads(tmp_path, capsys):
    file = tmp_path / "36_workloads-tiny.cpu.json"
    assert main(["bench", *TINY, "--workloads", "W1,W2", "--scale", "0.02", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "tiny (a toy): built in" in out and "max_model_len=4096" in out and "enable_prefix_caching=True" in out
    assert " output tokens/s" in out and " ms/token" in out and "peers" not in out
    result = load_result("36_workloads-tiny", MEASURED, folder=tmp_path, device="cpu")
    assert result.stale == () and result.machine["gpu"] == "" and result.machine["host_loop_seconds"] > 0
    about, first, second = result.rows
    assert (first["workload"], second["workload"]) == ("W1", "W2")
    assert about["ceilings"]["read"] > 0 and 0 < first["share_of_floor"] < 1
    assert about["settings"]["max_num_seqs"] == EngineConfig("x").max_num_seqs


def test_options_of_the_engine_reach_the_workloads(capsys):
    options = ["--workloads", "W2", "--scale", "0.01", "--max-num-seqs", "3", "--no-enable-prefix-caching"]
    assert main(["bench", *TINY, *options]) == 0
    out = capsys.readouterr().out
    assert "max_num_seqs=3" in out and "enable_prefix_caching=False" in out and "num_kv_blocks=512" in out


def test_a_shape_without_workloads_runs_all(monkeypatch, capsys):
    asked = {}

    def run(model, names, repeat, scale, profile, **options):
        asked.update(model=model, names=names, repeat=repeat, scale=scale, profile=profile, options=options)
        raise ValueError("enough")

    monkeypatch.setattr("minivllm.cli.run_workloads", run)
    assert main(["bench", "--model", "A", "--device", "cpu", "--profile"]) == 2
    assert asked["model"] == "A" and asked["names"] == ["W1", "W2", "W3", "W4", "W5"]
    assert (asked["repeat"], asked["scale"], asked["profile"]) == (3, 1.0, True)
    defaults = {f.name: f.default for f in dataclasses.fields(EngineConfig)} | {"device": "cpu"}
    assert all(defaults[name] == value for name, value in asked["options"].items())  # the engine's own


@pytest.mark.parametrize("argv, message", [
    (["--model", "tiny", "--workloads", "W1,W6"], "there is no W6, only W1, W2, W3, W4, W5"),
    (["--model", "tiny", "--workloads", ""], "there is no"),
    (["--model", "tiny", "--scale", "0"], "scale=0.0: must be above 0, at most 1"),
    (["--model", "tiny", "--scale", "1.5"], "scale=1.5: must be above 0, at most 1"),
    (["--scale", "0.5"], "add --workloads"),
    (["--profile"], "add --workloads"),
    (["--model", "tiny", "--compare", "transformers"], "--compare is about chat questions"),
    (["--model", "tiny", "--workloads", "W2,W3", "--max-model-len", "700"], "W3 has sequences of 2049 tokens, and max_model_len is 700"),
    (["--model", "tiny", "--workloads", "W2", "--profile"], "wants a CUDA device"),
    (["--model", "tiny", "--max-num-seqs", "0"], "max_num_seqs=0"),
])
def test_mistakes_about_workloads_are_one_line(argv, message, capsys, monkeypatch):
    monkeypatch.setattr("minivllm.workloads.run_requests", None)  # nothing is run first
    assert main(["bench", "--device", "cpu", *argv]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_lines_of_a_measured_shape():
    row = dict(workload="W1", seconds=4.0, output_tokens_per_second=33491.5, floor_seconds=3.0, share_of_floor=0.75,
               peer="vLLM 0.26.0", peer_seconds=5.85, ratio_to_peer=0.684, host_loop_seconds=0.002)
    trace = dict(workload="W1, steps 100 to 200", num_steps=100, window=0.4, idle_share=0.05, host_share=0.01)
    about = dict(model="A", start_up_seconds=6.04, settings=dict(max_num_seqs=256, max_model_len=40960, tensor_parallel_size=1))
    lines = workload_lines([about, row, trace])
    assert lines[0] == "A (Qwen3-0.6B): built in 6.0 s (nano-vllm: 9 s)"
    assert lines[1] == "max_num_seqs=256  max_model_len=40960  tensor_parallel_size=1"
    assert lines[3].split("  ")[:1] == ["W1"] and "33,492 output tokens/s" in lines[3] and "75%" in lines[3]
    assert "vLLM 0.26.0: 5.85 s  0.68" in lines[3]
    assert "NVIDIA H200" in lines[4] and "2026-11-29" in lines[4]
    assert lines[5] == "W1, steps 100 to 200: 4 ms a step, no kernel ran for 5.0% of it, waiting for the host 1.0%"
