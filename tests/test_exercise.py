"The final project: its checks are red without a solution, say what is wrong with a bad one, and turn green with a right one"
import ast
import json
import re
import sys
from pathlib import Path

import matplotlib
import pytest
import torch
from rigs import check_greedy

from minivllm import LLM, SamplingParams
from minivllm.models import registry

NOTEBOOK = Path(__file__).parents[1] / "nbs" / "40_llama32_exercise.ipynb"
CELLS = [("".join(cell["source"]), cell["cell_type"]) for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]]
BORDER = next(i for i, (source, kind) in enumerate(CELLS) if kind == "markdown" and "\n## The solution\n" in source)


def code(cells):
    return [source for source, kind in cells if kind == "code"]


def step_of(cell):
    "Which step a cell is the place for; None for all others"
    match = re.search(r"^# Step (\d)$", cell, re.M)
    return match and int(match[1])


EXERCISE, SECTION = code(CELLS[:BORDER]), code(CELLS[BORDER:])
SOLUTION = {step_of(cell): cell for cell in SECTION if step_of(cell)}
STEPS = range(1, 7)


@pytest.fixture
def run(monkeypatch, capsys):
    "A function that runs cells as a notebook would, in a process where nobody has solved anything yet"
    registry.registered_models()  # the package's own, before the copy: they register once
    monkeypatch.setattr(registry, "_MODELS", dict(registry._MODELS))
    matplotlib.use("Agg")

    def run(cells):
        main = type(sys)("__main__")
        monkeypatch.setitem(sys.modules, "__main__", main)  # where a notebook's classes are defined
        for cell in cells: exec(compile(cell, "cell", "exec"), main.__dict__)
        capsys.readouterr()
        return main

    return run


def findings(main, capsys, steps=STEPS):
    "What the checks print: step -> the problem, or None"
    capsys.readouterr()
    for step in steps: main.check(step)
    lines = re.findall(r"^step (\d): (right|not yet: .*?)(?=\n(?:step|\Z))", capsys.readouterr().out, re.M | re.S)
    return {int(step): None if text == "right" else text.removeprefix("not yet: ") for step, text in lines}


def with_solutions(solution):
    "The exercise without its last section, the given steps filled in where the reader would write"
    return [solution.get(step_of(cell), cell) for cell in EXERCISE]


def test_the_places_and_the_solution_belong_together():
    assert [step_of(cell) for cell in EXERCISE if step_of(cell)] == list(SOLUTION) == [1, 2, 3, 4, 5]
    for cell in EXERCISE:
        if not step_of(cell): continue
        names = lambda text: [node.name for node in ast.parse(text).body]  # noqa: E731
        assert names(cell) == names(SOLUTION[step_of(cell)])
        assert "NotImplementedError" in cell


def test_without_the_solution_every_check_is_red(run, capsys):
    main = run(EXERCISE)  # to its end, without an error
    found = findings(main, capsys)
    assert list(found) == list(STEPS) and None not in found.values()
    for step, name in enumerate(("llama3_frequencies", "Llama32Rotary", "Llama32Attention", "Llama32MLP"), 1): assert f"{name} is yours" in found[step]
    assert "no class has announced" in found[5] and "no class has announced" in found[6]


def test_as_it_is_stored_the_last_checks_are_green(run, capsys):
    main = run(EXERCISE + SECTION)
    assert findings(main, capsys) == dict.fromkeys(STEPS)


def test_following_the_task_turns_the_checks_green_one_by_one(run, capsys):
    main = run(EXERCISE)
    for step in SOLUTION:
        exec(SOLUTION[step], main.__dict__)
        found = findings(main, capsys, range(1, 6))
        assert [s for s, problem in found.items() if problem is None] == list(range(1, step + 1))
    assert findings(main, capsys, [6]) == {6: None}


@pytest.mark.parametrize("options", [
    dict(num_kv_blocks=200), dict(num_kv_blocks=44, block_size=4, max_num_seqs=8),
    dict(num_kv_blocks=200, max_num_batched_tokens=3), dict(num_kv_blocks=200, scheduling_policy="prefill_first"),
], ids=str)
def test_a_solved_exercise_says_what_transformers_says(run, options):
    "Greedy tokens in float32, through the real engine, by another judge than the notebook's own"
    main = run(with_solutions(SOLUTION))
    assert registry.get_model_class(main.NAME) is main.Llama32ForCausalLM
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(260, (n,), generator=generator).tolist() for n in (1, 2, 15, 16, 17, 63, 64, 65, 120)]
    with LLM(str(main.folder), skip_tokenizer_init=True, dtype="float32", device="cpu", **options) as llm:
        assert type(llm.engine.runner.model) is main.Llama32ForCausalLM
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=16), use_tqdm=False)
    ties = sum(check_greedy(main.reference, prompt, output.outputs[0].token_ids) for prompt, output in zip(prompts, outputs))
    assert ties <= 1


def test_the_package_has_the_same_tokens_for_this_checkpoint(run):
    main = run(with_solutions(SOLUTION))
    answers = []
    for folder in (main.folder, main.original):
        with LLM(str(folder), skip_tokenizer_init=True, dtype="float32", device="cpu", num_kv_blocks=200) as llm:
            answers.append([o.outputs[0].token_ids for o in llm.generate(main.prompts, SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)])
    assert answers[0] == answers[1]


MISTAKES = {  # name: (step, right, wrong, what the check has to say)
    "no scaling": (1, "inv_freq * (kept + (1 - kept) / factor)", "inv_freq", "without the scaling"),
    "half precision": (1, "default_inv_freq(head_dim, base)", "1.0 / base ** (torch.arange(0, head_dim, 2) / head_dim)", "float32"),
    "no ramp": (1, ".clamp(0, 1)", ".clamp(0, 1).round()", "between"),
    "ramp the wrong way": (1, "(kept + (1 - kept) / factor)", "(1 - kept + kept / factor)", "that are kept"),
    "no slowing": (1, "(1 - kept) / factor", "(1 - kept) / (2 * factor)", "between"),
    "not capped": (1, ".clamp(0, 1)", "", "that are kept"),
    "list": (1, "return inv_freq", "return 0 * head_dim\n    return inv_freq", "a tensor of"),
    "plain table": (2, "rope_cos_sin(inv_freq, max_position)", "self.cos_sin", "cosines are off"),
    "short table": (2, "rope_cos_sin(inv_freq, max_position)", "rope_cos_sin(inv_freq, 8)", "shape"),
    "cache of layer 0": (3, "rope, layer_idx,", "rope, 0,", "layer_idx"),
    "all heads": (3, "self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads", "config.num_heads, config.num_kv_heads", "one of two ranks"),
    "another name": (3, "self.o_proj", "self.out_proj", "o_proj.weight"),
    "biases": (3, "config.num_kv_heads, tp=tp", "config.num_kv_heads, True, tp=tp", "bias"),
    "hidden size": (3, "RowParallelLinear(config.num_heads * config.head_dim,", "RowParallelLinear(config.hidden_size,", "shape"),
    "forgotten return": (3, "return self.o_proj", "self.o_proj", "returns None"),
    "stream from the norm": (4, "x, residual = self.input_layernorm(x), x", "x = residual = self.input_layernorm(x)", "at the start"),
    "stream added twice": (4, "return self.mlp(x), residual", "return self.mlp(x) + residual, residual", "at the start"),
    "stream forgotten": (4, "self.input_layernorm(x, residual)", "self.input_layernorm(x), residual", "given a stream"),
    "one tensor": (4, "return self.mlp(x), residual", "return self.mlp(x) + residual", "two tensors"),
    "not registered": (5, "@register_model(NAME)\n", "", "no class has announced"),
    "no mapping": (5, "packed_modules = ", "packed = ", "packed_modules"),
    "head not tied": (5, "if config.tie_word_embeddings: self.lm_head.tie(self.model.embed_tokens)", "", "lm_head.weight"),
    "no last norm": (5, "return self.norm(x, residual)[0]", "return x + residual", "position 0"),
    "the package's rotation unscaled": (5, "Llama32Rotary(config, max_position)", "RotaryEmbedding(config.head_dim, max_position, config.rope_theta)", "the beginning is right"),
    "a table for each layer": (5, "Llama32DecoderLayer(config, i, rope,", "Llama32DecoderLayer(config, i, Llama32Rotary(config, 200),", "all layers share one"),
}


def test_the_checks_say_what_is_wrong(run, capsys):
    found = {}
    for name, (step, right, wrong, said) in MISTAKES.items():
        assert SOLUTION[step].count(right) >= 1, name
        registry._MODELS.pop("MyLlama32ForCausalLM", None)
        mistaken = {**SOLUTION, step: SOLUTION[step].replace(right, wrong)}
        main = run(with_solutions(mistaken)) if not found else main  # the cells around the solution are the same
        for cell in mistaken.values(): exec(cell, main.__dict__)
        found[name] = findings(main, capsys, [step])[step]
    silent = {name: found[name] for name, (*_, said) in MISTAKES.items() if said not in (found[name] or "")}
    assert not silent


def test_the_notebook_keeps_its_own_rules():
    "No finished Llama, and no finished scaling, in what the reader sees before the solution or in it"
    forbidden = {"llama3_inv_freq", "rope_inv_freq"}
    for cell in EXERCISE + SECTION:
        for node in ast.walk(ast.parse(cell)):
            if isinstance(node, ast.ImportFrom): assert not node.module.startswith("minivllm.models.") or node.module.split(".")[-1] in ("loader", "registry")
            if isinstance(node, ast.Name): assert node.id not in forbidden
    for cell in SOLUTION.values():
        for node in ast.walk(ast.parse(cell)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__": assert "rope_scaling" not in ast.unparse(node)
