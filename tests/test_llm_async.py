"AsyncLLM: many tasks, one engine; however a task ends its request ends too, and an error leaves nobody waiting"
import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest

import minivllm.llm_async
from minivllm import LLM, AsyncLLM, SamplingParams

T0 = dict(dtype="float32", block_size=4, num_kv_blocks=32, max_model_len=64, max_num_batched_tokens=64, max_num_seqs=4)
PROMPTS = ["one", "twenty-two", "three!", "fo", "five and more"]
LENGTHS = (20, 3, 11, 30, 8)


def greedy(n): return SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)


@pytest.fixture(scope="module")
def alone(folder):
    with LLM(str(folder), **T0) as llm:
        return [llm.generate(p, greedy(n), use_tqdm=False)[0].outputs[0].token_ids for p, n in zip(PROMPTS, LENGTHS)]


@pytest.fixture
def llm(folder):
    with AsyncLLM(str(folder), **T0) as llm:
        yield llm
        if not llm.thread.closed: asyncio.run(settled(llm))
    assert not llm.thread.is_alive() and llm.engine.runner is None


async def settled(llm):
    "All that was left behind is gone, within ten seconds"
    deadline = time.monotonic() + 10
    while llm.engine.requests or llm.thread.consumers or not llm.thread.commands.empty():
        assert time.monotonic() < deadline, f"left behind: {list(llm.engine.requests)}"
        await asyncio.sleep(0.002)
    manager = llm.engine.scheduler.block_manager
    assert manager.num_free_blocks == manager.num_blocks


async def read(llm, prompt, n):
    "The tokens of an answer; each output is the one before and more, and the last one is the end"
    tokens = []
    async for output in llm.generate(prompt, greedy(n)):
        newest = output.outputs[0].token_ids
        assert newest[: len(tokens)] == tokens and len(newest) > len(tokens)
        tokens = newest
    assert output.finished
    return tokens


async def read_all(llm): return await asyncio.gather(*(read(llm, p, n) for p, n in zip(PROMPTS, LENGTHS)))


def test_many_consumers_on_one_loop(llm, alone):
    async def main():
        assert await read_all(llm) == alone
        # fifty at once, for four places
        assert await asyncio.gather(*(read(llm, PROMPTS[i % 5], LENGTHS[i % 5]) for i in range(50))) == alone * 10

    asyncio.run(main())
    assert llm.metrics().mean_batch_size > 1.5


def test_several_loops_in_several_threads(llm, alone):
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(asyncio.run(read_all(llm)))) for _ in range(3)]
    for thread in threads: thread.start()
    for thread in threads: thread.join(60)
    assert answers == [alone] * 3


# fails without the line in the `finally` of `generate`
@pytest.mark.parametrize("leave", ["break", "cancel", "raise", "forget", "timeout"])
def test_however_a_consumer_leaves_its_request_goes(llm, alone, leave):
    async def leaves():
        async for output in llm.generate(PROMPTS[0], greedy(60)):
            if leave == "break": break
            if leave == "raise": 1 / 0

    aborted, abort, launch = [], llm.engine.abort_request, llm.engine.runner.launch
    llm.engine.abort_request = lambda request_id: aborted.append(abort(request_id))
    llm.engine.runner.launch = lambda *args: (time.sleep(0.002), launch(*args))[1]

    async def main():
        neighbours = asyncio.create_task(read_all(llm))
        if leave == "cancel":
            task = asyncio.create_task(leaves())
            for _ in range(5): await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError): await task
        elif leave == "forget":
            await anext(llm.generate(PROMPTS[0], greedy(60)))
            gc.collect()
        elif leave == "timeout":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.0005): await leaves()
        elif leave == "raise":
            with pytest.raises(ZeroDivisionError): await leaves()
        else: await leaves()
        assert await neighbours == alone
        await settled(llm)

    asyncio.run(main())
    assert [output.outputs[0].finish_reason for output in aborted] == ["abort"]


def test_a_loop_that_is_closed_is_nobody(llm, alone):
    "No `finally` can run there: the thread notices by itself (`except RuntimeError` in `tell`)"
    loop = asyncio.new_event_loop()
    generator = llm.generate(PROMPTS[0], greedy(60))
    loop.run_until_complete(anext(generator))
    loop.close()
    asyncio.run(settled(llm))
    assert asyncio.run(read_all(llm)) == alone


@pytest.mark.parametrize("prompt, error", [("", ValueError), ([260], ValueError), (None, TypeError), ("x" * 64, ValueError)])
def test_a_bad_prompt_is_its_own_consumers_error(llm, alone, prompt, error):
    async def main():
        good = asyncio.create_task(read_all(llm))
        with pytest.raises(error): await read(llm, prompt, 3)
        with pytest.raises(error): await anext(llm.generate("a", dict(temperature=0) if error is TypeError else greedy(3), priority="x"))
        assert await good == alone

    asyncio.run(main())


def test_an_error_of_the_engine_reaches_all_and_it_goes_on(llm, alone):  # fails if `fail` tells only the first
    async def main():
        launch, calls = llm.engine.runner.launch, 0

        def failing(*args):
            nonlocal calls
            calls += 1
            if calls == 5: raise ZeroDivisionError("in step five")
            return launch(*args)

        llm.engine.runner.launch = failing
        results = await asyncio.gather(*(read(llm, p, 30) for p in PROMPTS), return_exceptions=True)
        assert all(isinstance(r, RuntimeError) and "in step five" in str(r) for r in results)
        assert all(isinstance(r.__cause__, ZeroDivisionError) for r in results) and len(set(map(id, results))) == 5
        await settled(llm)
        assert await read_all(llm) == alone

    asyncio.run(main())


def test_an_engine_that_has_closed_itself_ends_the_thread(folder):
    "As one does that has lost its other ranks"
    llm = AsyncLLM(str(folder), **T0)

    def broken(*args):
        llm.engine.exit()
        raise RuntimeError("a rank is gone")

    llm.engine.runner.launch = broken
    with pytest.raises(RuntimeError, match="a rank is gone"): asyncio.run(read(llm, "a", 5))
    llm.thread.join(10)
    assert not llm.thread.is_alive()
    with pytest.raises(RuntimeError, match="closed"): asyncio.run(read(llm, "a", 5))
    llm.close()


def test_close_ends_everything(folder):
    async def main():
        llm = AsyncLLM(str(folder), **T0)
        tasks = [asyncio.create_task(read(llm, p, 60)) for p in PROMPTS[:4]]
        while llm.metrics().num_output_tokens < 4: await asyncio.sleep(0)
        await asyncio.to_thread(llm.close)
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert all(isinstance(r, RuntimeError) and "closed" in str(r) for r in results)
        llm.close()
        with pytest.raises(RuntimeError, match="closed"): await anext(llm.generate("a"))
        return llm

    llm = asyncio.run(main())
    assert not llm.thread.is_alive() and llm.engine.runner is None


def test_requests_that_come_while_it_closes_are_not_left_waiting(folder):
    "Nor do they, if more and more come, keep it from closing: fails without the question before `put` in `generate`"
    async def main():
        for pause in range(12):
            async with AsyncLLM(str(folder), **T0) as llm:
                closing = asyncio.create_task(asyncio.to_thread(llm.close))
                tasks = []
                while not closing.done():
                    tasks.append(asyncio.create_task(read(llm, "a", 2)))
                    for _ in range(1 + pause): await asyncio.sleep(0)
                tasks.append(asyncio.create_task(read(llm, "a", 2)))
                results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
                assert all(isinstance(r, list) or "closed" in str(r) for r in results)

    asyncio.run(main())


def test_who_is_slow_sees_the_newest_and_holds_up_nobody(llm, alone):
    async def main():
        lengths = []
        async for output in llm.generate(PROMPTS[0], greedy(LENGTHS[0])):
            lengths.append(len(output.outputs[0].token_ids))
            if len(lengths) == 1:
                deadline = time.monotonic() + 10
                while llm.engine.requests and time.monotonic() < deadline: time.sleep(0.001)  # the loop stands still, the engine doesn't
        assert output.outputs[0].token_ids == alone[0] and len(lengths) < LENGTHS[0]

    asyncio.run(main())


def test_one_that_is_dropped_ends_its_thread(folder):
    llm = AsyncLLM(str(folder), **T0)
    asyncio.run(read(llm, "a", 2))
    thread, there = llm.thread, weakref.ref(llm)
    del llm
    gc.collect()
    thread.join(10)
    assert there() is None and not thread.is_alive() and thread.engine.runner is None


def test_a_program_that_forgets_to_close_ends(folder):
    program = f"""
import asyncio
from minivllm import AsyncLLM, SamplingParams
llm = AsyncLLM({str(folder)!r}, **{T0!r})
async def main():
    task = asyncio.create_task(anext(llm.generate("a", SamplingParams(max_tokens=50, ignore_eos=True))))
    print(len((await task).outputs[0].token_ids) > 0)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "True\n", done.stderr


def test_priorities_seeds_and_chat(llm):
    async def main():
        order = []

        async def wait_for(name, priority):
            async for output in llm.generate(name, greedy(4), priority): pass
            order.append(name)

        # four places: the last four to come are the most urgent
        await asyncio.gather(*(wait_for(f"{i}", -(i >= 8)) for i in range(12)))
        assert order.index("11") < order.index("7")
        prompt = llm.chat_prompt([{"role": "user", "content": "Hi"}])
        assert await read(llm, prompt, 3)

    asyncio.run(main())


def test_outputs_of_a_step_wake_a_loop_once(llm, monkeypatch):
    "Not once for each consumer: that would be a system call each"
    calls, plain = [], minivllm.llm_async.put_all
    monkeypatch.setattr(minivllm.llm_async, "put_all", lambda items: (calls.append(len(items)), plain(items)))
    asyncio.run(read_all(llm))
    assert max(calls) == 4
