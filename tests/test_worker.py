"Calls between processes: none is lost, and whoever ends, nobody hangs and nothing is left behind"
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from processes import LIMIT, is_alive, within

import minivllm
import worker_rig
from minivllm.engine import worker
from minivllm.engine.worker import LENGTH_BYTES, NUMBER_BYTES, MessageRing, WorkerError, Workers


def segments():
    return set(os.listdir("/dev/shm"))


def notebooks(num_workers, *args):
    return Workers(num_workers, worker_rig.Notebook, lambda rank: args)


# The ring, between threads


def read_in_thread(reader, num_messages, got, pause=lambda i: None):
    def read():
        for i in range(num_messages):
            pause(i)
            got.append(reader.read_shm())

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


def running(*threads):
    "A check for a writer that waits: readers that have failed read no more"
    def check():
        assert all(thread.is_alive() for thread in threads)

    return check


@pytest.mark.parametrize("num_slots, slot_bytes", [(1, 64), (2, 13), (4, 1000), (8, 1 << 17)])
def test_messages_of_all_sizes_arrive(num_slots, slot_bytes):
    ring, got = MessageRing(1, num_slots, slot_bytes), []
    overhead = NUMBER_BYTES + LENGTH_BYTES + len(pickle.dumps(b"", protocol=5))
    sizes = [0, 1, *range(max(0, slot_bytes - overhead - 3), slot_bytes - overhead + 4), 3 * num_slots * slot_bytes + 1]
    sizes = [size for size in sizes if size < 300_000] + [50_000 if slot_bytes > 64 else 2000]
    messages = [os.urandom(size) for size in sizes]
    thread = read_in_thread(ring.reader(0), len(messages), got)
    for message in messages:
        ring.write_shm(message, running(thread))
    thread.join(LIMIT)
    ring.close()
    assert got == messages


def test_writer_waits_for_the_slowest_reader():
    ring, got = MessageRing(2, num_slots=4, slot_bytes=100), ([], [])
    threads = [
        read_in_thread(ring.reader(0), 50, got[0]),
        read_in_thread(ring.reader(1), 50, got[1], lambda i: time.sleep(0.2 * (i == 20))),
    ]
    for i in range(50):
        ring.write_shm(i, running(*threads))
        assert i - len(got[1]) <= 4 + 1
    for thread in threads:
        thread.join(LIMIT)
    ring.close()
    assert got == (list(range(50)),) * 2


def test_a_full_ring_looks_after_its_readers():
    ring, looks = MessageRing(1, num_slots=2, slot_bytes=100), []

    def check():
        looks.append(1)
        if len(looks) == 2:
            raise WorkerError("gone")

    with pytest.raises(WorkerError, match="gone"):
        for i in range(3):
            ring.write_shm(i, check)
    ring.close()


def test_a_part_out_of_turn_is_noticed():
    ring = MessageRing(1)
    ring.number = ring.num_slots
    ring.write_shm("late")
    with pytest.raises(RuntimeError, match="part 0 was expected.*8 is there"):
        ring.reader(0).read_shm()
    ring.close()


def test_a_message_too_long_for_its_length_is_refused(monkeypatch):
    monkeypatch.setattr(worker, "LENGTH_BYTES", 1)
    ring = MessageRing(1)
    with pytest.raises(ValueError, match="1 bytes"):
        ring.write_shm(bytes(300))
    ring.close()


# Processes


def test_ten_thousand_calls_nobody_waits_for():
    with_pause = notebooks(3)
    for i in range(10_000):
        with_pause.call("write", i)
        if i == 5000:
            with_pause.call("sleep", 0.2)
    assert with_pause.ask("read") == [list(range(10_000))] * 3
    with_pause.close()


def test_a_payload_larger_than_the_ring_arrives():
    workers, payload = notebooks(2), os.urandom(3 << 20)
    workers.call("write", payload)
    assert workers.ask("read") == [[payload]] * 2
    workers.close()


def test_two_groups_at_once_share_nothing():
    groups = [notebooks(1) for _ in range(2)]
    assert groups[0].ring.shm.name != groups[1].ring.shm.name
    for i, workers in enumerate(groups):
        workers.call("write", i)
    assert [workers.ask("read") for workers in groups] == [[[0]], [[1]]]
    for workers in groups:
        workers.close()


def test_close_leaves_nothing():
    before = segments()
    workers = notebooks(2)
    pids = [process.pid for process in workers.processes]
    workers.ask("read")
    workers.close()
    workers.close()
    gc.collect()
    assert not any(map(is_alive, pids)) and segments() <= before
    assert [process.exitcode for process in workers.processes] == [0, 0]  # by themselves


def test_a_worker_that_does_not_listen_is_ended():
    workers = notebooks(1)
    workers.call("sleep", 100)
    start = time.monotonic()
    workers.close(patience=0.3)
    assert time.monotonic() - start < LIMIT and workers.processes[0].exitcode == -signal.SIGKILL


def error_of(fn):
    "What `fn` raises; in a thread, since it may wait for ever"
    errors = []

    def run():
        try:
            fn()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT)
    assert not thread.is_alive(), f"still waiting after {LIMIT} seconds"
    return errors[0] if errors else None


@pytest.mark.parametrize("victim", [1, 2])
def test_a_killed_worker_is_named(victim):
    workers = notebooks(2)
    workers.ask("read")
    os.kill(workers.processes[victim - 1].pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(WorkerError, match=f"rank {victim} was killed by SIGKILL"):
        while time.monotonic() < start + LIMIT:
            workers.call("write", bytes(1 << 16))  # fills the ring: the dead don't acknowledge
    workers.close()
    assert not any(process.is_alive() for process in workers.processes)
    again = notebooks(2)
    assert again.ask("read") == [[], []]
    again.close()


def test_a_signal_without_a_name_has_a_number():
    workers, unnamed = notebooks(2), signal.SIGRTMIN + 1
    workers.ask("read")
    os.kill(workers.processes[1].pid, unnamed)
    error = error_of(lambda: workers.ask("read"))
    workers.close()
    assert isinstance(error, WorkerError) and f"rank 2 was killed by signal {unnamed}" in str(error)


def test_a_reply_that_cannot_be_read_ends_the_group():
    workers, freed = notebooks(1), threading.Event()
    workers.on_failure.append(freed.set)
    error = error_of(lambda: workers.ask("unreadable"))
    assert isinstance(error, WorkerError) and "ImportError: only on rank 0" in str(error)
    assert freed.wait(LIMIT) and workers.failed.wait(LIMIT)
    workers.close()
    assert not workers.processes[0].is_alive()


def test_rank_0_learns_of_an_end_whatever_its_watcher_does(monkeypatch):
    def fails(*args):
        raise MemoryError("nothing is left")

    monkeypatch.setattr(worker, "cause_of", fails)
    workers = notebooks(2)
    workers.ask("read")
    os.kill(workers.processes[0].pid, signal.SIGKILL)
    error = error_of(lambda: workers.ask("read"))
    assert isinstance(error, WorkerError) and "MemoryError: nothing is left" in str(error)
    workers.close()
    assert not any(process.is_alive() for process in workers.processes)


def test_a_worker_that_cannot_be_killed_keeps_nobody_from_being_told(monkeypatch):
    workers, freed = notebooks(2), threading.Event()
    workers.ask("read")
    workers.on_failure += [lambda: 1 / 0, freed.set]

    def refuse():
        raise PermissionError("not yours")

    monkeypatch.setattr(workers.processes[0], "kill", refuse)
    os.kill(workers.processes[1].pid, signal.SIGKILL)
    error = error_of(lambda: workers.ask("read"))
    assert isinstance(error, WorkerError) and "rank 2 was killed by SIGKILL" in str(error)
    assert freed.wait(LIMIT) and workers.failed.wait(LIMIT)
    monkeypatch.undo()
    workers.close()
    assert not any(process.is_alive() for process in workers.processes)


@pytest.mark.parametrize("victim", [1, 2])
def test_a_worker_that_ends_is_noticed_though_a_child_holds_its_pipe(victim):
    workers = notebooks(2)
    children = workers.ask("have_a_child")
    os.kill(workers.processes[victim - 1].pid, signal.SIGKILL)
    try:
        error = error_of(lambda: workers.ask("read"))
        start = time.monotonic()
        workers.close()
        assert time.monotonic() - start < LIMIT / 2 and not workers.watcher.is_alive()
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
    assert isinstance(error, WorkerError) and f"rank {victim} was killed by SIGKILL" in str(error)


def test_a_failing_call_comes_home_with_its_traceback():
    workers = notebooks(2)
    workers.call("sleep", "soon")
    with pytest.raises(WorkerError, match="(?s)rank . failed.*TypeError"):
        workers.ask("read")
    workers.close()


def test_a_failed_start_comes_home():
    workers = Workers(2, worker_rig.notebook, lambda rank: (rank, 2))
    with pytest.raises(WorkerError, match="(?s)rank 2 failed.*rank 2 has no pages"):
        workers.ask("read")
    workers.close()


def test_what_the_main_script_defines_is_refused(monkeypatch):
    monkeypatch.setattr(worker_rig.Notebook, "__module__", "__main__")
    before = segments()
    with pytest.raises(ValueError, match="Notebook is defined in the main script"):
        notebooks(1)
    assert segments() <= before


def test_ctrl_c_is_for_rank_0():
    workers = notebooks(2)
    workers.ask("read")
    for process in workers.processes:
        os.kill(process.pid, signal.SIGINT)
    workers.call("write", "still here")
    assert workers.ask("read") == [["still here"]] * 2
    workers.close()


def test_rank_0_that_leaves_a_step_ends_the_group():
    workers = notebooks(1)
    with pytest.raises(KeyError):
        with workers.guard():
            raise KeyError("mine")
    with pytest.raises(WorkerError, match="rank 0 left a step.*mine"):
        workers.call("write", 1)
    workers.close()
    assert not workers.processes[0].is_alive()


def test_a_forked_copy_ends_nobody():
    workers = notebooks(1)
    workers.ask("read")
    child = os.fork()
    if not child:
        workers.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert workers.ask("read") == [[]]
    workers.close()


# Whole programs

PROGRAM = """
import sys, time
sys.path[:0] = {path}
from minivllm.engine.worker import Workers
workers = Workers(2, list, lambda rank: ())
workers.call("append", 7)
print(workers.ask("copy"), *[process.pid for process in workers.processes], workers.ring.shm.name, flush=True)
{end}
"""


def program(tmp_path, end, *options):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM.format(path=[str(Path(minivllm.__file__).parent.parent)], end=end))
    command = [sys.executable, *options, script]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.parametrize("end, code", [("", 0), ("workers.close()", 0), ("raise SystemExit(3)", 3), ("1 / 0", 1), ("del workers", 0)])
def test_a_script_without_a_guard(tmp_path, end, code):
    "It runs once, ends by itself, and leaves no process, no segment and no warning"
    before = segments()
    script = program(tmp_path, end)
    output, errors = script.communicate(timeout=60)
    pids = output.split()[2:4]
    assert output.startswith("[[7], [7]]") and output.count("[[") == 1
    assert script.returncode == code and within(lambda: not any(map(is_alive, pids)))
    assert within(lambda: segments() <= before)
    assert ("ZeroDivisionError" in errors) if code == 1 else not errors


def test_a_killed_parent_takes_its_workers_along(tmp_path):
    script = program(tmp_path, "time.sleep(100)")
    *_, one, two, name = script.stdout.readline().split()
    script.kill()
    script.communicate(timeout=LIMIT)  # its workers hold the same pipes
    assert within(lambda: not is_alive(one) and not is_alive(two))
    assert within(lambda: name not in segments())


def test_a_killed_parent_of_busy_workers(tmp_path):
    script = program(tmp_path, "import threading\nwhile True: workers.call('__init__', [0] * 100_000)")
    *_, one, two, name = script.stdout.readline().split()
    script.kill()
    script.communicate(timeout=LIMIT)  # its workers hold the same pipes
    assert within(lambda: not is_alive(one) and not is_alive(two) and name not in segments())


def test_ctrl_c_in_a_terminal_goes_to_all_processes(tmp_path):
    end = "try: print('waits', flush=True); time.sleep(100)\nexcept KeyboardInterrupt: print(workers.ask('copy'))"
    script = program(tmp_path, end)
    while script.stdout.readline() != "waits\n":
        pass
    os.killpg(script.pid, signal.SIGINT)
    output, errors = script.communicate(timeout=60)
    assert output.strip() == "[[7], [7]]" and not errors and script.returncode == 0
