"What workers run must be found in a module; this one is imported quickly"
import time


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

    def exit(self):
        time.sleep(0.01)


def notebook(rank, bad_rank):
    "One of the ranks can't be made"
    return Notebook(f"rank {rank} has no pages" if rank == bad_rank else None)
