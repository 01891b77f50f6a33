"Every known fault has a test, and every such test fails once the mechanism is broken: see `cases.py`"
import ast
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cases import CASES, NUMBERS

TESTS = Path(__file__).parent
ROOT = TESTS.parent


@functools.cache
def functions_of(file: str) -> set:
    "Names of the tests in a file"
    return {node.name for node in ast.walk(ast.parse((TESTS / file).read_text())) if isinstance(node, ast.FunctionDef)}


def test_no_case_is_without_a_test():
    assert {case.number for case in CASES} == set(NUMBERS) and len(NUMBERS) == 52


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.number}-{case.file}")
def test_the_test_and_the_line_are_there(case):
    file, name = case.test.split("::")
    assert name in functions_of(file), f"{case.number}: {case.test} is gone; which test looks for: {case.fault}?"
    source = (ROOT / "minivllm" / case.file).read_text()
    assert source.count(case.line) == 1, f"{case.number}: {case.line!r} stands {source.count(case.line)} times in {case.file}; tests/cases.py must follow"
    assert case.broken != case.line


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.number}-{case.file}")
def test_a_broken_line_is_noticed(case, tmp_path):
    "In a copy of the package, so that nobody else sees the broken one"
    for folder in ("minivllm", "tests", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    module = tmp_path / "minivllm" / case.file
    module.write_text(module.read_text().replace(case.line, case.broken))
    ast.parse(module.read_text())
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=line", f"tests/{case.test}"]
    try: done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired: return  # a hang is noticed too
    assert done.returncode == 1 and "failed" in done.stdout, f"{case.test} does not notice {case.broken!r}:\n{done.stdout[-2000:]}"
