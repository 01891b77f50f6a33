"""Write the site's sidebar into _quarto.yml: every notebook, part by part, in the order of their file names.

    python tools/sidebar.py            # rewrite it
    python tools/sidebar.py --check    # say what is out of date, and exit 1
"""
import argparse
import difflib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "_quarto.yml"
START, END = "      # Written by tools/sidebar.py: begin\n", "      # Written by tools/sidebar.py: end\n"

# The parts of the book, and the number of the notebook that each begins with
PARTS = {
    0: "0 Instruments",
    2: "1 Layers",
    11: "2 Attention",
    16: "3 Models",
    25: "4 Memory",
    27: "5 Execution",
    32: "6 Scheduling",
    33: "7 Engine",
    40: "8 Exercise and glossary",
}


def number(name):
    "A notebook's place in reading order, from its file name; None for `index.ipynb`"
    match = re.match(r"(\d\d)_", name)
    return int(match[1]) if match else None


def part(name):
    "The part of the book that the notebook `name` belongs to"
    return PARTS[max(first for first in PARTS if first <= number(name))]


def notebooks(folder=ROOT / "nbs"):
    "File names of the notebooks in reading order, `index.ipynb` first"
    names = [p.name for p in folder.glob("*.ipynb") if p.name[0] not in "._"]
    return sorted(names, key=lambda name: (number(name) is not None, name))


def contents(names):
    "The lines of the sidebar's `contents` for these notebooks"
    lines, current = [], None
    for name in names:
        if number(name) is None:
            lines.append(f"      - {name}\n")
            continue
        if part(name) != current:
            current = part(name)
            lines += [f'      - section: "{current}"\n', "        contents:\n"]
        lines.append(f"          - {name}\n")
    return "".join(lines)


def rewrite(text, names):
    "The text of _quarto.yml with its sidebar brought up to date"
    before, rest = text.split(START)
    after = rest.split(END)[1]
    return before + START + contents(names) + END + after


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the sidebar is out of date")
    args = parser.parse_args()
    old = CONFIG.read_text(encoding="utf-8")
    new = rewrite(old, notebooks())
    if args.check and old != new:
        diff = difflib.unified_diff(old.splitlines(), new.splitlines(), "_quarto.yml", "as it should be", lineterm="", n=1)
        sys.exit("\n".join(diff) + "\nrun: python tools/sidebar.py")
    if not args.check:
        CONFIG.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
