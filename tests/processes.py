"Looking at processes, and waiting for something to happen to them, but not for ever"
import time
from pathlib import Path

LIMIT = 10.0  # seconds within which everything must have noticed


def within(condition, seconds=LIMIT):
    "Whether `condition()` comes true in time"
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def is_alive(pid):
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
