"The command line: generate, chat, bench"
import argparse
import dataclasses
import json
import statistics
import sys
import time

from minivllm import __version__
from minivllm.bench import machine, peak_rss
from minivllm.config import EngineConfig
from minivllm.demo import DEMO_MODEL
from minivllm.llm import LLM
from minivllm.models.loader import resolve_model
from minivllm.sampling_params import SamplingParams

DEMO_PROMPTS = [
    "What is the capital of France?",
    "Name the three primary colours.",
    "Why is the sky blue?",
    "Write one sentence about the sea.",
    "What is a large language model?",
    "Give me a synonym for 'happy'.",
    "How do plants make their food?",
    "What do you call a baby dog?",
]


def add_engine_options(parser: argparse.ArgumentParser):
    "An option for each field of `EngineConfig`, with its default"
    group = parser.add_argument_group("engine")
    for field in dataclasses.fields(EngineConfig):
        flag, default = "--" + field.name.replace("_", "-"), field.default
        if field.name == "model": group.add_argument(flag, default=DEMO_MODEL, help="local folder, Hub id, or the default: %(default)s")
        elif isinstance(default, bool): group.add_argument(flag, default=default, action=argparse.BooleanOptionalAction)
        else:
            kind = next(t for t in (float, int, str) if t.__name__ in str(field.type))
            group.add_argument(flag, default=default, type=kind, help="default: %(default)s")


def engine_options(args: argparse.Namespace) -> dict:
    "The engine's options among the parsed arguments"
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(EngineConfig)}


def add_sampling_options(parser: argparse.ArgumentParser, temperature: float, max_tokens: int):
    "Sampling options; the command line's defaults are those of its commands, not of the library"
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=temperature, help="0 is greedy; default: %(default)s")
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--top-k", type=int, default=0)
    group.add_argument("--min-p", type=float, default=0.0)
    group.add_argument("--max-tokens", type=int, default=max_tokens, help="default: %(default)s")
    group.add_argument("--request-seed", type=int, help="makes the answer reproducible whatever runs beside it")


def sampling_params(args: argparse.Namespace, **changes) -> SamplingParams:
    "The sampling parameters among the parsed arguments"
    return SamplingParams(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, min_p=args.min_p,
                          max_tokens=args.max_tokens, seed=args.request_seed, **changes)


def answer(llm: LLM, prompts: list[str], params: SamplingParams, raw: bool = False) -> list:
    "Answers through the chat template where the model has one; `raw` continues the text instead"
    if raw or not llm.engine.tokenizer.chat_template: return llm.generate(prompts, params)
    return llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)


def run_generate(args: argparse.Namespace):
    "Answer prompts, batched together"
    with LLM(**engine_options(args)) as llm:
        start = time.perf_counter()
        prompts = args.prompts or DEMO_PROMPTS
        outputs = answer(llm, prompts, sampling_params(args), args.raw)
        seconds = time.perf_counter() - start
        for prompt, output in zip(prompts, outputs):
            print(f"\n> {prompt}\n{output.outputs[0].text.strip()}")
        num_prompt, num_output = sum(len(o.prompt_token_ids) for o in outputs), sum(len(o.outputs[0].token_ids) for o in outputs)
        print(f"\n{len(outputs)} requests in {seconds:.1f} s: {num_prompt / seconds:.0f} prompt tokens/s, "
              f"{num_output / seconds:.0f} output tokens/s; peak memory {peak_rss() / 1e9:.2f} GB")


def run_chat(args: argparse.Namespace):
    "Talk with the model; the text appears as it is generated"
    with LLM(**engine_options(args)) as llm:
        messages = [{"role": "system", "content": args.system}] if args.system else []
        print("An empty line or Ctrl-D ends the chat.")
        while question := read_line("> "):
            messages.append({"role": "user", "content": question})
            text = ""
            for output in llm.stream(llm.chat_prompt(messages), sampling_params(args)):
                print(output.outputs[0].text[len(text):], end="", flush=True)
                text = output.outputs[0].text
            print()
            messages.append({"role": "assistant", "content": text})


def read_line(prompt: str) -> str:
    "A line from the user; empty at the end of input"
    try: return input(prompt).strip()
    except EOFError: return ""


def chat_token_ids(tokenizer, num_prompts: int) -> list[list[int]]:
    "The first of the demo's questions, as often as needed, written out by the chat template"
    texts = [tokenizer.apply_chat_template([{"role": "user", "content": DEMO_PROMPTS[i % len(DEMO_PROMPTS)]}], tokenize=False,
                                           add_generation_prompt=True) for i in range(num_prompts)]
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def time_minivllm(llm: LLM, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[list[int]]]:
    "Seconds and greedy tokens of one batch, without help from an earlier run's prefix cache"
    llm.engine.scheduler.block_manager.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start, [output.outputs[0].token_ids for output in outputs]


def time_transformers(model, prompts: list[list[int]], max_tokens: int, batched: bool) -> tuple[float, list[list[int]]]:
    "The same tokens from transformers' `generate`: one prompt after another, or one left-padded batch"
    import torch
    options = dict(max_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    start = time.perf_counter()
    if batched:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=model.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
        tokens = model.generate(ids, attention_mask=mask, **options)[:, longest:].tolist()
    else:
        rows = [torch.tensor([p], device=model.device) for p in prompts]
        tokens = [model.generate(row, attention_mask=torch.ones_like(row), **options)[0, row.shape[1]:].tolist() for row in rows]
    return time.perf_counter() - start, tokens


def run_bench(args: argparse.Namespace):
    "Output tokens per second of one batch of chat prompts, beside transformers where asked"
    llm = LLM(**engine_options(args))
    prompts = chat_token_ids(llm.engine.tokenizer, args.num_prompts)
    runs = {"minivllm": lambda: time_minivllm(llm, prompts, args.max_tokens)}
    if args.compare:
        from transformers import AutoModelForCausalLM
        runner = llm.engine.runner
        model = AutoModelForCausalLM.from_pretrained(resolve_model(args.model), dtype=runner.dtype).to(runner.device).eval()
        runs["transformers, batched"] = lambda: time_transformers(model, prompts, args.max_tokens, batched=True)
        runs["transformers, one by one"] = lambda: time_transformers(model, prompts, args.max_tokens, batched=False)
    rows = compare_runs(runs, args.repeat)
    result = dict(model=args.model, num_prompts=args.num_prompts, max_tokens=args.max_tokens, dtype=str(llm.engine.runner.dtype),
                  num_output_tokens=args.num_prompts * args.max_tokens, machine=machine(), rows=rows)
    for row in rows:
        row["output_tokens_per_second"] = result["num_output_tokens"] / row["seconds"]
        print(f"{row['name']:26} {row['seconds']:8.2f} s {row['output_tokens_per_second']:9.1f} output tokens/s "
              f"{row['seconds'] / rows[0]['seconds']:6.2f} x minivllm's time; {row['same_tokens']} of {args.num_prompts} answers equal")
    if args.json:
        with open(args.json, "w") as file: json.dump(result, file, indent=2)


def compare_runs(runs: dict, repeat: int) -> list[dict]:
    "Run everything in turn, `repeat` times after a warm-up; the median of each, and how many answers equal the first one's"
    seconds, tokens = {name: [] for name in runs}, {}
    for turn in range(repeat + 1):
        for name, run in runs.items():
            taken, tokens[name] = run()
            if turn: seconds[name].append(taken)
    first = next(iter(tokens.values()))
    return [dict(name=name, seconds=statistics.median(times), all_seconds=times,
                 same_tokens=sum(a == b for a, b in zip(tokens[name], first))) for name, times in seconds.items()]


def build_parser() -> argparse.ArgumentParser:
    "The command line's grammar"
    parser = argparse.ArgumentParser("minivllm", description="A small, fast inference engine")
    parser.add_argument("--version", action="version", version=f"minivllm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    generate = commands.add_parser("generate", help="answer prompts, batched together", description=run_generate.__doc__)
    generate.add_argument("prompts", nargs="*", metavar="PROMPT", help="default: eight questions of the demo")
    generate.add_argument("--raw", action="store_true", help="continue the text as it is, without the chat template")
    chat = commands.add_parser("chat", help="talk with a model", description=run_chat.__doc__)
    chat.add_argument("--system", help="system message")
    bench = commands.add_parser("bench", help="measure throughput", description=run_bench.__doc__)
    bench.add_argument("--num-prompts", type=int, default=8, help="default: %(default)s")
    bench.add_argument("--max-tokens", type=int, default=64, help="of each answer; default: %(default)s")
    bench.add_argument("--repeat", type=int, default=3, help="timed runs of each; default: %(default)s")
    bench.add_argument("--compare", choices=["transformers"], help="run this beside it, in turn, on the same prompts")
    bench.add_argument("--json", metavar="FILE", help="write the result to FILE")
    add_sampling_options(generate, temperature=0.0, max_tokens=64)
    add_sampling_options(chat, temperature=0.7, max_tokens=512)
    for command, run in ((generate, run_generate), (chat, run_chat), (bench, run_bench)):
        add_engine_options(command)
        command.set_defaults(run=run)
    return parser


def main(argv: list[str] | None = None) -> int:
    "Run a command; a mistake of the user's is one line on stderr and exit code 2"
    args = build_parser().parse_args(argv)
    try: args.run(args)
    except (ValueError, TypeError, OSError, MemoryError) as error:
        print(f"minivllm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt: return 130
    return 0


if __name__ == "__main__": sys.exit(main())
