"What workers run must be found in a module; this one is imported quickly"
import os
import time


class Unreadable:
    "Something that can be sent, and not be read"

    def __reduce__(self):
        return refuse, ()


def refuse():
    raise ImportError("only on rank 0")


class Notebook:
    "Writes down what it is told"

    def __init__(self, trouble=None):
        if trouble:
            raise ValueError(trouble)
        self.lines = []

    def write(self, line):
        self.lines.append(line)

    def sleep(self, seconds):
        time.sleep(seconds)

    def read(self):
        return self.lines

    def unreadable(self):
        return Unreadable()

    def have_a_child(self):
        "A child that outlives this process, and holds whatever this process has open"
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        return child

    def exit(self):
        time.sleep(0.01)


def notebook(rank, bad_rank):
    "One of the ranks can't be made"
    return Notebook(f"rank {rank} has no pages" if rank == bad_rank else None)
